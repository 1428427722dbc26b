// Both ends of a forward pass: rows out of tables, and logits from the last residual.

#pragma once

#include <cstdlib>
#include <cstring>

#include "arguments.h"

namespace {

// Rows of a table by their numbers. False, and nothing is promised, where one is not in it.
PyObject *take_rows(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
  Arguments next(args, nargs, 6);
  char *to = next.at<char>();
  const char *table = next.at<const char>();
  const int64_t table_rows = next.size(), row_bytes = next.size();
  const int64_t *ids = next.at<const int64_t>();
  const int64_t rows = next.size();
  if (!next.good()) return nullptr;
  for (int64_t row = 0; row < rows; row++) {
    if (ids[row] < 0 || ids[row] >= table_rows) Py_RETURN_FALSE;
    const auto bytes = static_cast<size_t>(row_bytes);
    std::memcpy(to + row * row_bytes, table + ids[row] * row_bytes, bytes);
  }
  Py_RETURN_TRUE;
}

inline void widen(float *to, const bf16 *from, int64_t num) {
  for (int64_t nth = 0; nth < num; nth++) {
    const uint32_t bits = static_cast<uint32_t>(from[nth]) << 16;
    std::memcpy(to + nth, &bits, sizeof bits);
  }
}

inline void widen(float *to, const float *from, int64_t num) {
  std::memcpy(to, from, static_cast<size_t>(num) * sizeof *to);
}

template <class Id>
void narrow_ids(char *to, const int64_t *ids, int64_t layers, int64_t rows, int64_t top_k) {
  auto *next = reinterpret_cast<Id *>(to);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t layer = 0; layer < layers; layer++) {
      const int64_t *of_row = ids + (layer * rows + row) * top_k;
      for (int64_t nth = 0; nth < top_k; nth++) *next++ = static_cast<Id>(of_row[nth]);
    }
  }
}

// Norm, product with the head, and its outputs as float32, rounded to T before; and experts, which
// are [layers, rows, top_k], as [rows, layers, top_k] of one or two bytes each.
METHOD(finish) {
  float *out = next.at<float>();
  interlace::Norm<T> norm = {};
  norm.x = next.at<const T>();
  norm.weight = next.at<const T>();
  norm.rows = next.size(), norm.width = norm.x_stride = next.size();
  norm.eps = next.real();
  interlace::Product<T> product = {};
  product.packed = next.at<const T>();
  product.outputs = product.out_stride = next.size();
  char *experts = next.at<char>();
  const int64_t id_size = next.size();
  const int64_t *ids = next.at<const int64_t>();
  const int64_t layers = next.size(), rows = next.size(), top_k = next.size();
  if (!next.good()) return nullptr;
  const auto size = static_cast<size_t>(norm.rows * (norm.width + product.outputs)) * sizeof(T);
  auto *scratch = static_cast<T *>(std::aligned_alloc(64, (size + 64) / 64 * 64));
  if (scratch == nullptr) return PyErr_NoMemory();
  norm.out = scratch;
  product.x = norm.out, product.x_stride = product.inputs = norm.width, product.rows = norm.rows;
  product.out = scratch + norm.rows * norm.width;
  bool good = true;
  Py_BEGIN_ALLOW_THREADS;
  if (id_size == 1) {
    narrow_ids<uint8_t>(experts, ids, layers, rows, top_k);
  } else {
    narrow_ids<int16_t>(experts, ids, layers, rows, top_k);
  }
  kernels.norm(norm);
  good = kernels.multiply(product);
  if (good) widen(out, product.out, norm.rows * product.outputs);
  Py_END_ALLOW_THREADS;
  std::free(scratch);
  return done(good);
}

}  // namespace
