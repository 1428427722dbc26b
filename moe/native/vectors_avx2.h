// Sixteen floats at a time, and tiles of a product, with AVX2 and FMA.
//
// There is no arithmetic on bfloat16 here: a pair of neighbouring inputs is widened by a shift and
// a mask.

constexpr int64_t PANEL = UNIT;
constexpr int64_t MAX_ROWS = 6;
constexpr int64_t MAX_UNITS = 4;

struct Vec {
  __m256 low, high;
};

inline Vec all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Vec load(const float *from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float *to, Vec v) {
  _mm256_storeu_ps(to, v.low);
  _mm256_storeu_ps(to + 8, v.high);
}
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Vec larger(Vec a, Vec b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Vec fused(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

inline float sum(Vec v) {
  const __m256 eight = _mm256_add_ps(v.low, v.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(Vec v) {
  const __m256 eight = _mm256_max_ps(v.low, v.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// The first `count` lanes of v, and `other` in the rest.
inline Vec first_lanes(Vec v, int64_t count, float other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const int num = static_cast<int>(count);
  const __m256 low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(num), lane));
  const __m256 high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(num - 8), lane));
  const __m256 rest = _mm256_set1_ps(other);
  return {_mm256_blendv_ps(rest, v.low, low), _mm256_blendv_ps(rest, v.high, high)};
}

inline __m256 between(__m256 x, float least, float most) {
  return _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(least)), _mm256_set1_ps(most));
}
inline __m256 nearest_whole(__m256 x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// 2^(whole + part), the part at most a half.
inline __m256 exp2_of(__m256 whole, __m256 part) {
  __m256 value = _mm256_set1_ps(EXP2_TERMS[0]);
  for (int term = 1; term < NUM_EXP2_TERMS; term++) {
    value = _mm256_fmadd_ps(value, part, _mm256_set1_ps(EXP2_TERMS[term]));
  }
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return _mm256_mul_ps(value, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline __m256 exp2_of(__m256 x) {
  x = between(x, LEAST_EXPONENT, MOST_EXPONENT);
  const __m256 whole = nearest_whole(x);
  return exp2_of(whole, _mm256_sub_ps(x, whole));
}
// e^x without the rounding of x * log2(e).
inline __m256 exp_of(__m256 x) {
  x = between(x, -MOST_POWER, MOST_POWER);
  const __m256 factor = _mm256_set1_ps(LOG2_E);
  const __m256 whole = nearest_whole(_mm256_mul_ps(x, factor));
  const __m256 part = _mm256_fmsub_ps(x, factor, whole);
  return exp2_of(whole, _mm256_fmadd_ps(x, _mm256_set1_ps(LOG2_E_REST), part));
}
inline Vec exp2_of(Vec v) { return {exp2_of(v.low), exp2_of(v.high)}; }
inline Vec exp_of(Vec v) { return {exp_of(v.low), exp_of(v.high)}; }

inline __m256 widened(__m128i eight) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
}
inline Vec widen(const bf16 *from) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return {widened(_mm256_castsi256_si128(both)), widened(_mm256_extracti128_si256(both, 1))};
}
inline Vec widen(const float *from) { return load(from); }
inline __m256i rounded(__m256 v) {  // to nearest, ties to even, in the low halves
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
}
inline void narrow(bf16 *to, Vec v) {
  const __m256i both = _mm256_packus_epi32(rounded(v.low), rounded(v.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm256_permute4x64_epi64(both, 0xD8));
}
inline void narrow(float *to, Vec v) { store(to, v); }

inline void narrow(float *to, __m256 eight) { _mm256_storeu_ps(to, eight); }
inline void narrow(bf16 *to, __m256 eight) {
  const __m256i bits = rounded(eight);
  const __m128i both =
      _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(to), both);
}

// silu(gate) * up of `units` units, each eight gates and their eight ups.
template <class T>
inline void gate(T *to, const float *sums, int64_t units) {
  const __m256 one = _mm256_set1_ps(1.0f);
  for (int64_t unit = 0; unit < units; unit++) {
    const __m256 gates = _mm256_loadu_ps(sums + unit * UNIT);
    const __m256 ups = _mm256_loadu_ps(sums + unit * UNIT + 8);
    const __m256 power = exp_of(_mm256_sub_ps(_mm256_setzero_ps(), gates));
    const __m256 gated = _mm256_mul_ps(_mm256_div_ps(gates, _mm256_add_ps(one, power)), ups);
    narrow(to + unit * 8, gated);
  }
}

// ---- tiles

// Whether a tile asks for what is read next.
constexpr bool ASKS_AHEAD = true;
// Of one tile alone, from so many rows on.
constexpr int64_t ASKS_ALONE_FROM = INT64_MAX;

// Eight columns of the `nth` input of a run.
inline __m256 columns_at(const float *run, int) { return _mm256_loadu_ps(run); }
inline __m256 columns_at(const bf16 *run, int nth) {
  const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(run));
  const __m256i second = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return _mm256_castsi256_ps(nth == 0 ? _mm256_slli_epi32(word, 16)
                                      : _mm256_and_si256(word, second));
}

// [ROWS, UNITS * 16] sums over whole runs of inputs; units lie `unit_size` elements apart.
template <class T, int ROWS, int UNITS>
void tile(const float *rows, int64_t stride, const T *packed, int64_t unit_size, int64_t inputs,
          float *out, Ahead next) {
  constexpr int run = static_cast<int>(RUN<T>);
  __m256 sums[ROWS][UNITS][2];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) {
      sums[row][unit][0] = sums[row][unit][1] = _mm256_setzero_ps();
    }
  }
  const float *x[ROWS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) x[row] = rows + row * stride;
  for (int64_t input = 0; input < inputs; input += run) {
    const T *from = packed + input * UNIT;
    ask(next);
#pragma GCC unroll 2
    for (int nth = 0; nth < run; nth++) {
      __m256 columns[UNITS][2];
#pragma GCC unroll 8
      for (int unit = 0; unit < UNITS; unit++) {
#pragma GCC unroll 2
        for (int eight = 0; eight < 2; eight++) {
          columns[unit][eight] = columns_at(from + unit * unit_size + eight * 8 * run, nth);
        }
      }
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; row++) {
        const __m256 value = _mm256_broadcast_ss(x[row] + input + nth);
#pragma GCC unroll 8
        for (int unit = 0; unit < UNITS; unit++) {
#pragma GCC unroll 2
          for (int eight = 0; eight < 2; eight++) {
            sums[row][unit][eight] =
                _mm256_fmadd_ps(value, columns[unit][eight], sums[row][unit][eight]);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) {
      float *to = out + row * MAX_UNITS * UNIT + unit * UNIT;
      store(to, {sums[row][unit][0], sums[row][unit][1]});
    }
  }
}

// How many of the rows that are left a tile takes. Tiles of 4 are avoided: they have too few sums
// to keep two multipliers busy, and too many to take two units at once.
inline int64_t height_of_tile(int64_t left) {
  if (left == 4) return 3;
  if (left == 8 || left == 10) return 5;
  return lesser(left, MAX_ROWS);
}

template <class T>
using Tile = void (*)(const float *, int64_t, const T *, int64_t, int64_t, float *, Ahead);

// Few rows meet several units at once: one unit alone would wait for its own last sum.
inline int64_t units_at_once(int64_t rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

template <class T>
inline Tile<T> tile_of(int64_t rows, int64_t units) {
  static constexpr Tile<T> TILES[MAX_ROWS][MAX_UNITS] = {
      {tile<T, 1, 1>, tile<T, 1, 2>, tile<T, 1, 3>, tile<T, 1, 4>},
      {tile<T, 2, 1>, tile<T, 2, 2>, nullptr, nullptr},
      {tile<T, 3, 1>, tile<T, 3, 2>, nullptr, nullptr},
      {tile<T, 4, 1>, nullptr, nullptr, nullptr},
      {tile<T, 5, 1>, nullptr, nullptr, nullptr},
      {tile<T, 6, 1>, nullptr, nullptr, nullptr},
  };
  return TILES[rows - 1][units - 1];
}
