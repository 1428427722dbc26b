// Products with packed weights: one, and those of experts. What sums them up is in sums*.h.

template <class T>
inline void put(T *to, const float *sums, int64_t columns) {
  int64_t at = 0;
  for (; at + UNIT <= columns; at += UNIT) narrow(to + at, load(sums + at));
  if (at < columns) {
    T rest[UNIT];
    narrow(rest, load(sums + at));
    std::memcpy(to + at, rest, static_cast<size_t>(columns - at) * sizeof *rest);
  }
}

// Puts the sums of a product where they belong: row i is row places[i] of `out`, or i without them.
template <class T>
inline auto into(T *out, int64_t stride, int64_t outputs, const int64_t *places) {
  return [=](int64_t row, int64_t rows, int64_t unit, int64_t units, const float *sums) {
    const int64_t columns = lesser(units * UNIT, outputs - unit * UNIT);
    for (int64_t nth = row; nth < row + rows; nth++) {
      const int64_t place = places == nullptr ? nth : places[nth];
      put(out + place * stride + unit * UNIT, sums + (nth - row) * MAX_UNITS * UNIT, columns);
    }
  };
}

template <class T>
bool multiply(const Product<T> &p) {
  const int64_t most = lesser(rows_of_block<T>(p.inputs), p.rows);
  Scratch<Staged<T>> scratch(staged_size<T>(most, p.inputs));
  if (!scratch.good()) return false;
  const int64_t stride = staged_stride<T>(p.inputs, p.x_stride);
  for (int64_t row = 0; row < p.rows; row += most) {
    const int64_t rows = lesser(most, p.rows - row);
    const Staged<T> *x =
        stage(scratch.get(), p.x + row * p.x_stride, p.x_stride, rows, p.inputs);
    multiply_staged<T>(x, stride, rows, p.packed, p.outputs, p.inputs, p.aside,
                    into<T>(p.out + row * p.out_stride, p.out_stride, p.outputs, nullptr));
  }
  return true;
}

// Rows [row, row + rows) of the pass as tiles read them.
template <class T>
inline const Staged<T> *rows_of_pass(Staged<T> *scratch, const ExpertPass<T> &p, int64_t row,
                                     int64_t rows) {
  if (p.reads == nullptr) {
    return stage(scratch, p.x + row * p.x_stride, p.x_stride, rows, p.hidden);
  }
  for (int64_t nth = 0; nth < rows; nth++) {
    stage_row(scratch + nth * p.hidden, p.x + p.reads[row + nth] * p.x_stride, p.hidden);
  }
  return scratch;
}

template <class T>
bool experts(const ExpertPass<T> &p) {
  int64_t highest = 0;
  for (int64_t expert = 0; expert < p.experts; expert++) {
    highest = greater(highest, p.counts[expert]);
  }
  const int64_t fitting = lesser(rows_of_block<T>(p.hidden), rows_of_block<T>(p.width));
  const int64_t most = lesser(fitting, highest);
  const int64_t chosen_size = p.reads == nullptr ? 0 : most * p.hidden;
  Scratch<Staged<T>> staged(
      greater(chosen_size, staged_size<T>(most, greater(p.hidden, p.width))));
  Scratch<T> inner(most * p.width);
  if (!staged.good() || !inner.good()) return false;
  T *gated = inner.get();
  const int64_t x_stride =
      p.reads == nullptr ? staged_stride<T>(p.hidden, p.x_stride) : p.hidden;
  const int64_t inner_stride = staged_stride<T>(p.width, p.width);
  int64_t row = 0;
  for (int64_t expert = 0; expert < p.experts; expert++) {
    const T *gate_up = p.matrices[2 * expert], *down = p.matrices[2 * expert + 1];
    for (const int64_t end = row + p.counts[expert]; row < end;) {
      const int64_t rows = lesser(most, end - row);
      const Staged<T> *x = rows_of_pass(staged.get(), p, row, rows);
      multiply_staged<T>(x, x_stride, rows, gate_up, 2 * p.width, p.hidden, p.aside,
                      [&](int64_t first, int64_t high, int64_t unit, int64_t units,
                          const float *sums) {
                        for (int64_t nth = 0; nth < high; nth++) {
                          gate(gated + (first + nth) * p.width + unit * UNIT / 2,
                               sums + nth * MAX_UNITS * UNIT, units);
                        }
                      });
      const Staged<T> *h = stage(staged.get(), gated, p.width, rows, p.width);
      const bool placed = p.writes != nullptr;
      multiply_staged<T>(h, inner_stride, rows, down, p.hidden, p.width, p.aside,
                      into<T>(placed ? p.out : p.out + row * p.out_stride, p.out_stride, p.hidden,
                              placed ? p.writes + row : nullptr));
      row += rows;
    }
  }
  return true;
}
