// Packed weights: the order in which products read them.

inline int64_t padded(int64_t outputs) { return (outputs + UNIT - 1) / UNIT * UNIT; }

// Where output `n`'s input `k` lies. Panels of up to PANEL outputs follow one another; in a panel
// runs of inputs follow one another, each of all its outputs: [inputs / RUN, outputs, RUN].
template <class T>
inline int64_t place(int64_t n, int64_t k, int64_t outputs, int64_t inputs) {
  const int64_t first = n / PANEL * PANEL;
  const int64_t wide = lesser(PANEL, outputs - first);
  return first * inputs + k / RUN<T> * wide * RUN<T> + (n - first) * RUN<T> + k % RUN<T>;
}

template <class T>
void pack(T *to, const T *from, int64_t outputs, int64_t inputs, int64_t output_stride,
          int64_t input_stride) {
  for (int64_t first = 0; first < padded(outputs); first += PANEL) {
    const int64_t wide = lesser(PANEL, padded(outputs) - first);
    T *panel = to + first * inputs;
    for (int64_t n = 0; n < wide; n++) {
      const T *row = from + (first + n) * output_stride;
      for (int64_t k = 0; k < inputs; k++) {
        panel[k / RUN<T> * wide * RUN<T> + n * RUN<T> + k % RUN<T>] =
            first + n < outputs ? row[k * input_stride] : T{0};
      }
    }
  }
}
