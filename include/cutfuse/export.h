/// \file
/// Symbol visibility of the shared library: everything is hidden except what carries CUTFUSE_API.
#pragma once

#define CUTFUSE_API __attribute__((visibility("default")))
