// Methods of the module that have a kernel for each type. Shapes are in kernels.h.

#pragma once

#include <utility>
#include <vector>

#include "apart.h"
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

// The items of a sequence of integers; false with an error set.
bool integers(PyObject *sequence, std::vector<int64_t> &into) {
  PyObject *fast = PySequence_Fast(sequence, "counts and matrices must be sequences");
  if (fast == nullptr) return false;
  into.resize(PySequence_Fast_GET_SIZE(fast));
  bool good = true;
  for (size_t nth = 0; good && nth < into.size(); nth++) {
    into[nth] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast, nth));
    good = !(into[nth] == -1 && PyErr_Occurred());
  }
  Py_DECREF(fast);
  return good;
}

// A pass through experts and the memory of its numbers.
template <class T>
struct ExpertWork {
  interlace::ExpertPass<T> pass = {};
  std::vector<int64_t> counts, matrices;

  // False with an error set.
  bool take(Arguments &next) {
    pass.out = next.at<T>();
    pass.x = next.at<const T>();
    pass.x_stride = next.size();
    pass.reads = next.at<const int64_t>();
    pass.writes = next.at<const int64_t>();
    pass.hidden = pass.out_stride = next.size();
    pass.width = next.size();
    if (!next.good() || !integers(next.object(), counts) || !integers(next.object(), matrices)) {
      return false;
    }
    if (matrices.size() != 2 * counts.size()) {
      PyErr_Format(PyExc_ValueError, "%zu counts for %zu matrices: each expert has two",
                   counts.size(), matrices.size());
      return false;
    }
    pass.experts = static_cast<int64_t>(counts.size());
    pass.counts = counts.data();
    static_assert(sizeof(T *) == sizeof(int64_t), "addresses are 64 bits wide");
    pass.matrices = reinterpret_cast<const T *const *>(matrices.data());
    return true;
  }
};

METHOD(experts) {
  ExpertWork<T> work;
  return work.take(next) ? run(kernels.experts, work.pass) : nullptr;
}

// The same, to be computed by and by.
METHOD(experts_apart) {
  ExpertWork<T> work;
  if (!work.take(next)) return nullptr;
  auto job = [run = kernels.experts, work = std::move(work)](interlace::Aside *aside) mutable {
    work.pass.aside = aside;
    return run(work.pass);
  };
  return apart(std::move(job), next.object());
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
