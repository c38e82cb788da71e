/// \file
/// What the shift kernel multiplies one after the other: halves of steps, by lane groups and taps.
#pragma once

#include "conv/shift/layout.h"

namespace cutfuse::conv::shift {

inline constexpr int32_t kReach = 1 << 18;  // bytes that a descriptor can name

/// The order of lane-channels, after their number and how x comes are known.
void set_order(Geometry* g);

/// Whether patches one below the other share a ring of rows, after the order and the patch are
/// known: then a row is converted once and stays where it is. roomy: a block that begins anew need
/// not wait until the patch before has been read.
void set_ring(const ConvPolicy& policy, bool roomy, Layout* layout);

/// The table of steps, after the ring is known.
Status set_steps(Layout* layout);

}  // namespace cutfuse::conv::shift
