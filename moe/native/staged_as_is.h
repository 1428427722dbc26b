// What a tile reads of rows where it multiplies their own type: the rows as they are.

template <class T>
using Staged = T;

template <class T>
inline int64_t staged_stride(int64_t, int64_t stride) {
  return stride;
}
template <class T>
inline int64_t staged_size(int64_t, int64_t) {
  return 0;
}
template <class T>
inline const T *stage(T *, const T *x, int64_t, int64_t, int64_t) {
  return x;
}
template <class T>
inline void stage_row(T *to, const T *x, int64_t inputs) {
  std::memcpy(to, x, static_cast<size_t>(inputs) * sizeof *x);
}
// Puts 16 values where a tile reads them, and says which values it will read.
template <class T>
inline Vec stage(T *to, Vec v) {
  narrow(to, v);
  return widen(to);
}
