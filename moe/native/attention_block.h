// A layer up to its experts: kernels one after another.

#pragma once

#include <cstdlib>

#include "apart.h"
#include "arguments.h"

namespace {

// From a residual to its rows' experts: everything of a layer that no collective interrupts when
// heads are not split. What each part does is its own kernel's business; this is their order.
template <class T>
struct Block {
  interlace::Norm<T> before = {}, after = {};
  interlace::Product<T> qkv = {}, o = {}, router = {};
  interlace::Heads<T> heads = {};
  interlace::Attention<T> attention = {};
  interlace::Choice<T> choice = {};

  // What is the same in all layers of a pass.
  void take_rows(Arguments &next) {
    heads.cos = next.at<const float>();
    heads.sin = next.at<const float>();
    heads.slots = next.at<const int64_t>();
    attention.pages = heads.pages = next.at<T>();
    attention.tables = next.at<const int64_t>();
    attention.tables_stride = next.size();
    attention.starts = next.at<const int64_t>();
    attention.positions = next.at<const int64_t>();
    attention.sequences = next.size();
  }

  // Of `Arguments` or `Numbers`.
  template <class From>
  void take_layer(From &next) {
    const int64_t hidden = next.size();
    before.x_stride = after.x_stride = before.width = after.width = hidden;
    before.weight = next.template at<const T>();
    qkv.packed = next.template at<const T>();
    heads.norm = next.template at<const T>();
    attention.heads = heads.heads = next.size();
    attention.kv_heads = heads.kv_heads = next.size();
    attention.width = heads.width = next.size();
    attention.scale = next.real();
    o.packed = next.template at<const T>();
    after.weight = next.template at<const T>();
    router.packed = next.template at<const T>();
    choice.experts = next.size();
    choice.top_k = next.size();
    choice.normalise = next.size() != 0;
    choice.scale = next.real();
    after.factor = next.real();
    after.eps = before.eps = heads.eps = next.real();
  }

  int64_t width() const { return heads.heads * heads.width; }
  int64_t qkv_width() const { return width() + 2 * heads.kv_heads * heads.width; }

  // Elements of the memory that `run` works in.
  int64_t scratch_size(int64_t rows) const {
    return rows * (2 * before.width + qkv_width() + 2 * width() + choice.experts);
  }

  // `x`: the residual. `sum`, `out`, `ids`, `weights`: what comes out. False: there was no memory.
  bool run(const interlace::KernelsOf<T> &kernels, int64_t rows, const T *x, T *sum, T *out,
           int64_t *ids, float *weights, T *scratch) {
    const int64_t hidden = before.width;
    before.x = after.x = x;
    after.sum = sum, after.out = out;
    choice.ids = ids, choice.weights = weights;
    before.rows = after.rows = qkv.rows = o.rows = router.rows = rows;
    heads.rows = choice.rows = rows;
    before.out = scratch;
    qkv.outputs = qkv_width();
    qkv.out = before.out + rows * hidden;
    heads.queries = qkv.out + rows * qkv.outputs;
    attention.out = heads.queries + rows * width();
    o.out = attention.out + rows * width();
    router.out = o.out + rows * hidden;
    qkv.x = before.out, qkv.x_stride = qkv.inputs = hidden, qkv.out_stride = qkv.outputs;
    heads.qkv = qkv.out, heads.qkv_stride = qkv.outputs;
    attention.queries = heads.queries;
    o.x = attention.out, o.x_stride = o.inputs = width(), o.out_stride = o.outputs = hidden;
    after.y = o.out;
    router.x = out, router.x_stride = router.inputs = hidden;
    router.out_stride = router.outputs = choice.experts;
    choice.logits = router.out, choice.logits_stride = choice.experts;
    kernels.norm(before);
    if (!kernels.multiply(qkv) || !kernels.turn_heads(heads) || !kernels.attend(attention) ||
        !kernels.multiply(o)) {
      return false;
    }
    kernels.norm(after);
    return kernels.multiply(router) && kernels.choose(choice);
  }
};

// A block with what it reads and writes.
template <class T>
struct BlockWork {
  Block<T> block;
  T *sum, *out;
  int64_t *ids;
  float *weights;
  const T *x;
  int64_t rows;

  // False with an error set.
  bool take(Arguments &next) {
    sum = next.at<T>(), out = next.at<T>();
    ids = next.at<int64_t>();
    weights = next.at<float>();
    x = next.at<const T>();
    rows = next.size();
    block.take_rows(next);
    block.take_layer(next);
    return next.good();
  }

  // False: there was no memory.
  bool run(const interlace::KernelsOf<T> &kernels, interlace::Aside *aside) {
    const size_t size = static_cast<size_t>(block.scratch_size(rows)) * sizeof(T);
    auto *scratch = static_cast<T *>(std::aligned_alloc(64, (size + 64) / 64 * 64));
    if (scratch == nullptr) return false;
    block.qkv.aside = block.attention.aside = block.o.aside = block.router.aside = aside;
    const bool good = block.run(kernels, rows, x, sum, out, ids, weights, scratch);
    std::free(scratch);
    return good;
  }
};

METHOD(attention_block) {
  BlockWork<T> work;
  if (!work.take(next)) return nullptr;
  bool good;
  Py_BEGIN_ALLOW_THREADS;
  good = work.run(kernels, nullptr);
  Py_END_ALLOW_THREADS;
  return done(good);
}

// The same, to be computed by and by.
METHOD(attention_block_apart) {
  BlockWork<T> work;
  if (!work.take(next)) return nullptr;
  auto job = [of = &kernels, work](interlace::Aside *aside) mutable { return work.run(*of, aside); };
  return apart(job, next.object());
}

}  // namespace
