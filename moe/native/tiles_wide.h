// Tiles of a product with AVX-512 where bfloat16 is widened to float32: a pair of neighbouring inputs
// by a shift and a mask. There are processors on which two float32 products take less time than one
// product of pairs.

inline Vec columns_at(const float *run, int) { return load(run); }
inline Vec columns_at(const bf16 *run, int nth) {
  const __m512i word = _mm512_loadu_si512(run);
  const __m512i second = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return _mm512_castsi512_ps(nth == 0 ? _mm512_slli_epi32(word, 16)
                                      : _mm512_and_si512(word, second));
}

// Whether a tile asks for what is read next.
constexpr bool ASKS_AHEAD = true;
// Of one tile alone, from so many rows on.
constexpr int64_t ASKS_ALONE_FROM = 2;

// [ROWS, UNITS * 16] sums over whole runs of inputs of one panel of UNITS units.
template <class T, int ROWS, int UNITS>
void tile(const float *rows, int64_t stride, const T *packed, int64_t, int64_t inputs, float *out,
          Ahead next) {
  constexpr int run = static_cast<int>(RUN<T>);
  Vec sums[ROWS][UNITS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) sums[row][unit] = all(0.0f);
  }
  const float *x[ROWS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) x[row] = rows + row * stride;
  for (int64_t input = 0; input < inputs; input += run) {
#pragma GCC unroll 2
    for (int nth = 0; nth < run; nth++) {
      Vec columns[UNITS];
#pragma GCC unroll 8
      for (int unit = 0; unit < UNITS; unit++) {
        columns[unit] = columns_at(packed + unit * run * UNIT, nth);
      }
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; row++) {
        const Vec value = all(x[row][input + nth]);
#pragma GCC unroll 8
        for (int unit = 0; unit < UNITS; unit++) {
          sums[row][unit] = fused(value, columns[unit], sums[row][unit]);
        }
      }
    }
    packed += UNITS * run * UNIT;
    ask(next);
  }
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) {
      store(out + row * MAX_UNITS * UNIT + unit * UNIT, sums[row][unit]);
    }
  }
}
