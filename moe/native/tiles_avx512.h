// Which tile a product takes with AVX-512. A tile is as wide as a panel: even a single row has four
// sums that do not wait for each other.

constexpr int64_t MAX_ROWS = 6;

inline int64_t units_at_once(int64_t) { return MAX_UNITS; }
inline int64_t height_of_tile(int64_t left) { return lesser(left, MAX_ROWS); }

template <class T>
using Tile = void (*)(const Staged<T> *, int64_t, const T *, int64_t, int64_t, float *, Ahead);

template <class T>
inline Tile<T> tile_of(int64_t rows, int64_t units) {
  static constexpr Tile<T> TILES[MAX_ROWS][MAX_UNITS] = {
      {tile<T, 1, 1>, tile<T, 1, 2>, tile<T, 1, 3>, tile<T, 1, 4>}, {tile<T, 2, 1>, tile<T, 2, 2>, tile<T, 2, 3>, tile<T, 2, 4>},
      {tile<T, 3, 1>, tile<T, 3, 2>, tile<T, 3, 3>, tile<T, 3, 4>}, {tile<T, 4, 1>, tile<T, 4, 2>, tile<T, 4, 3>, tile<T, 4, 4>},
      {tile<T, 5, 1>, tile<T, 5, 2>, tile<T, 5, 3>, tile<T, 5, 4>}, {tile<T, 6, 1>, tile<T, 6, 2>, tile<T, 6, 3>, tile<T, 6, 4>},
  };
  return TILES[rows - 1][units - 1];
}
