#pragma once

struct alignas(64) CUtensorMap {
  unsigned char opaque[128];
};
