// Tiles of a product with AVX-512's products of pairs of bfloat16.

// Whether a tile asks for what is read next.
constexpr bool ASKS_AHEAD = true;
// Of one tile alone, from so many rows on.
constexpr int64_t ASKS_ALONE_FROM = INT64_MAX;

// A run of one row's inputs for all lanes, a run of each lane's own, and their products added up.
inline __m512 spread(const float *run) { return _mm512_set1_ps(*run); }
inline __m512bh spread(const bf16 *run) {
  int32_t two;
  std::memcpy(&two, run, sizeof two);
  return (__m512bh)_mm512_set1_epi32(two);
}
inline __m512 columns_at(const float *runs) { return _mm512_loadu_ps(runs); }
inline __m512bh columns_at(const bf16 *runs) { return (__m512bh)_mm512_loadu_si512(runs); }
inline Vec summed(__m512 a, __m512 b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec summed(__m512bh a, __m512bh b, Vec c) { return _mm512_dpbf16_ps(c, a, b); }

// [ROWS, UNITS * 16] sums over whole runs of inputs of one panel of UNITS units.
template <class T, int ROWS, int UNITS>
void tile(const T *rows, int64_t stride, const T *packed, int64_t, int64_t inputs, float *out,
          Ahead next) {
  Vec sums[ROWS][UNITS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) sums[row][unit] = _mm512_setzero_ps();
  }
  const T *x[ROWS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) x[row] = rows + row * stride;
  for (int64_t input = 0; input < inputs; input += RUN<T>) {
    decltype(columns_at(packed)) columns[UNITS];
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) {
      columns[unit] = columns_at(packed + unit * RUN<T> * UNIT);
    }
    packed += UNITS * RUN<T> * UNIT;
    ask(next);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) {
      const auto value = spread(x[row] + input);
#pragma GCC unroll 8
      for (int unit = 0; unit < UNITS; unit++) {
        sums[row][unit] = summed(value, columns[unit], sums[row][unit]);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) {
      store(out + row * MAX_UNITS * UNIT + unit * UNIT, sums[row][unit]);
    }
  }
}
