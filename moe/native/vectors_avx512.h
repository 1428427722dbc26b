// Sixteen floats at a time with AVX-512. What multiplies them is in tiles_*.h and sums_amx.h.

constexpr int64_t PANEL = 4 * UNIT;
constexpr int64_t MAX_UNITS = 4;

using Vec = __m512;

inline Vec all(float value) { return _mm512_set1_ps(value); }
inline Vec load(const float *from) { return _mm512_loadu_ps(from); }
inline void store(float *to, Vec v) { _mm512_storeu_ps(to, v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec fused(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }

// The first `count` lanes of v, and `other` in the rest.
inline Vec first_lanes(Vec v, int64_t count, float other) {
  const uint32_t lanes = count >= UNIT ? 0xffffu : count <= 0 ? 0u : (1u << count) - 1;
  return _mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>(lanes), v);
}

inline Vec between(Vec x, float least, float most) {
  return _mm512_min_ps(_mm512_max_ps(x, all(least)), all(most));
}
inline Vec nearest_whole(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// 2^(whole + part), the part at most a half.
inline Vec exp2_of(Vec whole, Vec part) {
  Vec value = all(EXP2_TERMS[0]);
  for (int term = 1; term < NUM_EXP2_TERMS; term++) {
    value = _mm512_fmadd_ps(value, part, all(EXP2_TERMS[term]));
  }
  return _mm512_scalef_ps(value, whole);
}
inline Vec exp2_of(Vec x) {
  x = between(x, LEAST_EXPONENT, MOST_EXPONENT);
  const Vec whole = nearest_whole(x);
  return exp2_of(whole, sub(x, whole));
}
// e^x without the rounding of x * log2(e).
inline Vec exp_of(Vec x) {
  x = between(x, -MOST_POWER, MOST_POWER);
  const Vec whole = nearest_whole(mul(x, all(LOG2_E)));
  const Vec part = _mm512_fmsub_ps(x, all(LOG2_E), whole);
  return exp2_of(whole, fused(x, all(LOG2_E_REST), part));
}

inline Vec widen(const bf16 *from) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(both), 16));
}
inline Vec widen(const float *from) { return load(from); }
inline void narrow(bf16 *to, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), (__m256i)_mm512_cvtneps_pbh(v));
}
inline void narrow(float *to, Vec v) { store(to, v); }

// silu(gate) * up of whole panels, each 32 gates and their 32 ups.
template <class T>
inline void gate(T *to, const float *sums, int64_t units) {
  for (int64_t at = 0; at < units * UNIT; at += PANEL) {
    for (int64_t half = 0; half < PANEL / 2; half += UNIT) {
      const Vec gates = load(sums + at + half), ups = load(sums + at + PANEL / 2 + half);
      const Vec power = exp_of(sub(all(0.0f), gates));
      narrow(to + at / 2 + half, mul(div(gates, add(all(1.0f), power)), ups));
    }
  }
}
