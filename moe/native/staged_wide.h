// What a tile reads of rows where bfloat16 is widened: rows are widened once, before they meet all
// columns. Rows of float32 are read where they are.

template <class T>
using Staged = float;

template <class T>
constexpr bool STAGED = sizeof(T) < sizeof(float);
template <class T>
inline int64_t staged_stride(int64_t inputs, int64_t stride) {
  return STAGED<T> ? inputs : stride;
}
template <class T>
inline int64_t staged_size(int64_t rows, int64_t inputs) {
  return STAGED<T> ? rows * inputs : 0;
}
inline const float *stage(float *, const float *x, int64_t, int64_t, int64_t) { return x; }
inline void stage_row(float *to, const float *x, int64_t inputs) {
  std::memcpy(to, x, static_cast<size_t>(inputs) * sizeof *x);
}
inline void stage_row(float *to, const bf16 *x, int64_t inputs) {
  int64_t at = 0;
  for (; at + UNIT <= inputs; at += UNIT) store(to + at, widen(x + at));
  for (; at < inputs; at++) to[at] = real(x[at]);
}
inline const float *stage(float *scratch, const bf16 *x, int64_t stride, int64_t rows,
                          int64_t inputs) {
  for (int64_t row = 0; row < rows; row++) stage_row(scratch + row * inputs, x + row * stride, inputs);
  return scratch;
}
// Puts 16 values where a tile reads them, and says which values it will read.
inline Vec stage(float *to, Vec v) {
  store(to, v);
  return v;
}
