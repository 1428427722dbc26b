// Methods of the module that have a kernel for each type. Shapes are in kernels.h.

#pragma once

#include "arguments.h"

namespace {

METHOD(pack) {
  T *to = next.at<T>();
  const T *from = next.at<const T>();
  int64_t sizes[4];
  for (int64_t &size : sizes) size = next.size();
  if (!next.good()) return nullptr;
  kernels.pack(to, from, sizes[0], sizes[1], sizes[2], sizes[3]);
  Py_RETURN_NONE;
}

METHOD(multiply) {
  interlace::Product<T> p;
  p.out = next.at<T>();
  p.out_stride = next.size();
  p.x = next.at<const T>();
  p.x_stride = next.size();
  p.rows = next.size();
  p.packed = next.at<const T>();
  p.outputs = next.size();
  p.inputs = next.size();
  return next.good() ? run(kernels.multiply, p) : nullptr;
}

// The items of a sequence of integers; null with an error set. To be freed with PyMem_Free.
int64_t *integers(PyObject *sequence, Py_ssize_t *size) {
  PyObject *fast = PySequence_Fast(sequence, "counts and matrices must be sequences");
  if (fast == nullptr) return nullptr;
  *size = PySequence_Fast_GET_SIZE(fast);
  auto *items = static_cast<int64_t *>(PyMem_Malloc((*size + 1) * sizeof(int64_t)));
  if (items == nullptr) PyErr_NoMemory();
  for (Py_ssize_t nth = 0; items != nullptr && nth < *size; nth++) {
    items[nth] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast, nth));
    if (items[nth] == -1 && PyErr_Occurred()) {
      PyMem_Free(items);
      items = nullptr;
    }
  }
  Py_DECREF(fast);
  return items;
}

METHOD(experts) {
  interlace::ExpertPass<T> p;
  p.out = next.at<T>();
  p.x = next.at<const T>();
  p.x_stride = next.size();
  p.reads = next.at<const int64_t>();
  p.writes = next.at<const int64_t>();
  p.hidden = p.out_stride = next.size();
  p.width = next.size();
  if (!next.good()) return nullptr;
  Py_ssize_t num_counts = 0, num_matrices = 0;
  int64_t *counts = integers(next.object(), &num_counts);
  int64_t *matrices = counts == nullptr ? nullptr : integers(next.object(), &num_matrices);
  PyObject *result = nullptr;
  if (matrices != nullptr && num_matrices != 2 * num_counts) {
    PyErr_Format(PyExc_ValueError, "%zd counts for %zd matrices: each expert has two", num_counts,
                 num_matrices);
  } else if (matrices != nullptr) {
    p.experts = num_counts;
    p.counts = counts;
    static_assert(sizeof(T *) == sizeof(int64_t), "addresses are 64 bits wide");
    p.matrices = reinterpret_cast<const T *const *>(matrices);
    result = run(kernels.experts, p);
  }
  PyMem_Free(matrices);
  PyMem_Free(counts);
  return result;
}

METHOD(norm) {
  interlace::Norm<T> n;
  n.out = next.at<T>();
  n.sum = next.at<T>();
  n.x = next.at<const T>();
  n.x_stride = next.size();
  n.y = next.at<const T>();
  n.weight = next.at<const T>();
  n.rows = next.size();
  n.width = next.size();
  n.eps = next.real();
  n.factor = next.real();
  if (!next.good()) return nullptr;
  kernels.norm(n);
  Py_RETURN_NONE;
}

METHOD(choose) {
  interlace::Choice<T> c;
  c.ids = next.at<int64_t>();
  c.weights = next.at<float>();
  c.logits = next.at<const T>();
  c.logits_stride = next.size();
  c.rows = next.size();
  c.experts = next.size();
  c.top_k = next.size();
  c.normalise = next.size() != 0;
  c.scale = next.real();
  return next.good() ? done(kernels.choose(c)) : nullptr;
}

METHOD(mix) {
  interlace::Mix<T> m;
  m.out = next.at<T>();
  m.residual = next.at<const T>();
  m.outputs = next.at<const T>();
  m.places = next.at<const int64_t>();
  m.weights = next.at<const float>();
  m.rows = next.size();
  m.top_k = next.size();
  m.width = m.stride = next.size();
  m.factor = next.real();
  if (!next.good()) return nullptr;
  kernels.mix(m);
  Py_RETURN_NONE;
}

METHOD(turn_heads) {
  interlace::Heads<T> h;
  h.queries = next.at<T>();
  h.qkv = next.at<const T>();
  h.qkv_stride = next.size();
  h.norm = next.at<const T>();
  h.cos = next.at<const float>();
  h.sin = next.at<const float>();
  h.slots = next.at<const int64_t>();
  h.pages = next.at<T>();
  h.rows = next.size();
  h.heads = next.size();
  h.kv_heads = next.size();
  h.width = next.size();
  h.eps = next.real();
  return next.good() ? done(kernels.turn_heads(h)) : nullptr;
}

METHOD(attend) {
  interlace::Attention<T> a;
  a.out = next.at<T>();
  a.queries = next.at<const T>();
  a.pages = next.at<const T>();
  a.tables = next.at<const int64_t>();
  a.tables_stride = next.size();
  a.starts = next.at<const int64_t>();
  a.positions = next.at<const int64_t>();
  a.sequences = next.size();
  a.heads = next.size();
  a.kv_heads = next.size();
  a.width = next.size();
  a.scale = next.real();
  return next.good() ? run(kernels.attend, a) : nullptr;
}

}  // namespace
