// Tiles: runs of a permutation whose rows share an adapter slot (and an expert). A list is sorted by
// its first row, and its surplus entries, which have no rows, lie behind all others.
#pragma once

namespace amphora {

struct Tile {
  int expert;
  int slot;
  int first;
  int rows;
};

// Entry `index` of a list whose entries are `words` long: slot, first, rows, and in lists of four the
// expert in front.
__device__ __forceinline__ Tile tile_at(const int* tiles, int words, int index) {
  const int* entry = tiles + static_cast<long long>(index) * words;
  return Tile{words == 4 ? entry[0] : 0, entry[words - 3], entry[words - 2], entry[words - 1]};
}

// The slot of the row at `position`; -1 if no tile has it.
__device__ __forceinline__ int slot_at(const int* tiles, int words, int count, int position) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    const Tile tile = tile_at(tiles, words, middle);
    if (tile.rows > 0 && tile.first <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0) return -1;
  const Tile tile = tile_at(tiles, words, low - 1);
  return position < tile.first + tile.rows ? tile.slot : -1;
}

}  // namespace amphora
