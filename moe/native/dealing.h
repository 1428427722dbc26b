// Rows dealt out by expert, and who is next where they arrived: what does not ask for a row's type.

#pragma once

#include <cstdlib>
#include <cstring>

#include "arguments.h"

namespace {

// `next_of` has the number of rows of expert e at e + 1; then where each expert's rows begin.
inline void add_up(int64_t *next_of, int64_t experts) {
  for (int64_t expert = 0; expert < experts; expert++) next_of[expert + 1] += next_of[expert];
}

// A row for each id at the next place of the expert that it names; `places` gets where.
inline void place_rows(char *to, int64_t *places, int64_t *next_of, const char *rows,
                       int64_t row_bytes, int64_t stride_bytes, const int64_t *ids,
                       int64_t num_ids, int64_t top_k) {
  for (int64_t nth = 0; nth < num_ids; nth++) {
    const int64_t at = next_of[ids[nth]]++;
    places[nth] = at;
    std::memcpy(to + at * row_bytes, rows + nth / top_k * stride_bytes,
                static_cast<size_t>(row_bytes));
  }
}

// Rows that came from several members, each one's sorted by expert: which are the first expert's,
// member by member, and so on. `counts` is [members, experts]; `next_of` is zero at first.
inline void order_rows(int64_t *order, int64_t *next_of, const int64_t *counts, int64_t members,
                       int64_t experts) {
  for (int64_t nth = 0; nth < members * experts; nth++) next_of[nth % experts + 1] += counts[nth];
  add_up(next_of, experts);
  int64_t row = 0;
  for (int64_t nth = 0; nth < members * experts; nth++) {
    for (int64_t left = counts[nth]; left > 0; left--) order[next_of[nth % experts]++] = row++;
  }
}

// Rows dealt out by expert: for each expert in its order the rows that go to it, by row and slot.
PyObject *deal(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
  Arguments next(args, nargs, 10);
  char *to = next.at<char>();
  int64_t *places = next.at<int64_t>(), *counts = next.at<int64_t>();
  const char *rows = next.at<const char>();
  const int64_t row_bytes = next.size(), stride_bytes = next.size();
  const int64_t *ids = next.at<const int64_t>();
  const int64_t num_ids = next.size(), top_k = next.size();
  const int64_t experts = next.size();
  if (!next.good()) return nullptr;
  auto *next_of = static_cast<int64_t *>(std::calloc(static_cast<size_t>(experts) + 1, 8));
  if (next_of == nullptr) return PyErr_NoMemory();
  bool good = true;
  for (int64_t nth = 0; nth < num_ids; nth++) {
    good = good && ids[nth] >= 0 && ids[nth] < experts;
    if (good) next_of[ids[nth] + 1]++;
  }
  if (good) {
    std::memcpy(counts, next_of + 1, static_cast<size_t>(experts) * sizeof *counts);
    add_up(next_of, experts);
    place_rows(to, places, next_of, rows, row_bytes, stride_bytes, ids, num_ids, top_k);
  }
  std::free(next_of);
  if (good) Py_RETURN_NONE;
  PyErr_Format(PyExc_ValueError, "an id that is none of %lld experts'",
               static_cast<long long>(experts));
  return nullptr;
}

// `order_rows` for Python.
PyObject *by_expert(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
  Arguments next(args, nargs, 4);
  int64_t *order = next.at<int64_t>();
  const int64_t *counts = next.at<const int64_t>();
  const int64_t members = next.size(), experts = next.size();
  if (!next.good()) return nullptr;
  auto *next_of = static_cast<int64_t *>(std::calloc(static_cast<size_t>(experts) + 1, 8));
  if (next_of == nullptr) return PyErr_NoMemory();
  order_rows(order, next_of, counts, members, experts);
  std::free(next_of);
  Py_RETURN_NONE;
}

}  // namespace
