// A description's numbers laid out for a forward pass: what `Batch` does with whole arrays.

#pragma once

#include "arguments.h"

namespace {

// The items of a tuple of integers, one by one; nothing but -1 once one is none.
class Integers {
 public:
  explicit Integers(PyObject *tuple) : tuple_(tuple), size_(PyTuple_Check(tuple) ? PyTuple_GET_SIZE(tuple) : -1) {}
  int64_t size() const { return size_; }
  int64_t at(int64_t nth) {
    const int64_t item = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple_, nth));
    good_ = good_ && item != -1;  // none of these numbers is negative
    return item;
  }
  bool good() const { return good_ && size_ >= 0; }

 private:
  PyObject *tuple_;
  int64_t size_;
  bool good_ = true;
};

// Rows, and the blocks where their keys and values are.
struct Layout {
  static constexpr int64_t BLOCK = interlace::BLOCK;
  int64_t *ids, *positions;  // [padded]
  int64_t *slots;            // [rows]
  int64_t *tables;           // [sequences, width]
  int64_t *starts;           // [sequences + 1]
  int64_t *lengths;          // [sequences]
  int64_t *samples;          // [samples]
  int64_t padded, width, blocks;

  // False where the numbers do not fit together.
  bool fill(Integers ids_of, Integers positions_of, Integers starts_of, PyObject *tables_of,
            Integers samples_of) {
    const int64_t rows = ids_of.size(), sequences = starts_of.size() - 1;
    if (rows < 0 || positions_of.size() != rows || rows > padded || sequences < 0 ||
        !PyTuple_Check(tables_of) || PyTuple_GET_SIZE(tables_of) != sequences) {
      return false;
    }
    for (int64_t row = 0; row < padded; row++) {
      ids[row] = row < rows ? ids_of.at(row) : 0;
      positions[row] = row < rows ? positions_of.at(row) : 0;
    }
    for (int64_t nth = 0; nth <= sequences; nth++) starts[nth] = starts_of.at(nth);
    for (int64_t nth = 0; nth < samples_of.size(); nth++) samples[nth] = samples_of.at(nth);
    if (starts[0] != 0 || starts[sequences] != rows) return false;
    for (int64_t nth = 0; nth < sequences; nth++) {
      Integers table(PyTuple_GET_ITEM(tables_of, nth));
      if (!table.good() || table.size() > width || !of_sequence(nth, rows, table)) return false;
    }
    return ids_of.good() && positions_of.good() && starts_of.good() && samples_of.good();
  }

 private:
  bool of_sequence(int64_t nth, int64_t rows, Integers &table) {
    const int64_t begin = starts[nth], end = starts[nth + 1];
    if (begin >= end || end > rows) return false;
    int64_t *own = tables + nth * width;
    for (int64_t at = 0; at < width; at++) {
      own[at] = at < table.size() ? table.at(at) : 0;
      if (own[at] < 0 || own[at] >= blocks) return false;
    }
    for (int64_t row = begin; row < end; row++) {
      const int64_t position = positions[row];
      if (position < 0 || position / BLOCK >= table.size()) return false;
      slots[row] = own[position / BLOCK] * BLOCK + position % BLOCK;
    }
    lengths[nth] = positions[end - 1] + 1;
    return true;
  }
};

// Fills memory for all of a `Layout`, part behind part; False where the description does not fit
// together, and then for its caller to say why.
PyObject *lay_out(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
  Arguments next(args, nargs, 9);
  auto *to = next.at<int64_t>();
  Layout layout = {};
  layout.padded = next.size(), layout.width = next.size(), layout.blocks = next.size();
  if (!next.good()) return nullptr;
  Integers ids(next.object()), positions(next.object()), starts(next.object());
  PyObject *tables = next.object();
  Integers samples(next.object());
  const int64_t sequences = starts.size() - 1;
  layout.ids = to, to += layout.padded;
  layout.positions = to, to += layout.padded;
  layout.slots = to, to += ids.size();
  layout.tables = to, to += sequences * layout.width;
  layout.starts = to, to += sequences + 1;
  layout.lengths = to, to += sequences;
  layout.samples = to;
  const bool good = layout.fill(ids, positions, starts, tables, samples);
  if (PyErr_Occurred()) PyErr_Clear();
  return PyBool_FromLong(good);
}

}  // namespace
