/// \file
/// How the shift kernel reads x: which rows a block takes, who converts what, and the pieces that
/// the copy engine brings.
#pragma once

#include "conv/shift/layout.h"

namespace cutfuse::conv::shift {

inline constexpr int32_t kFewestPieces = 3;

/// Sets the pixels from one row of the grid to the next, of which `columns` yield results. Where
/// the copy engine may bring x, rows are as long as its boxes, which begin at 16 bytes.
void set_pitch(bool by_pieces, int32_t columns, Geometry* g);

/// Whether a block takes many tiles one below the other, and of each reads what the one above has
/// not. Blocks that write next to each other serve DRAM better, unless they read much twice.
bool rolls(const Geometry& g);

/// Bytes of a piece of so many rows of the grid, with its guard.
int32_t bytes_of_piece(const Geometry& g, int64_t rows);

/// Sets the rows of a piece, and how many pieces are in `room` bytes; none where they would be so
/// few or so small that the lanes' own copies are faster.
void set_pieces(int64_t room, int32_t warps, int32_t planes, Geometry* g);

/// Divides the producers' warps between pixels and groups so that the busiest has least to do.
void share_out(const ConvPolicy& policy, Layout* layout);

}  // namespace cutfuse::conv::shift
