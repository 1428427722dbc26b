// A layer up to its experts: kernels one after another.

#pragma once

#include <cstdlib>

#include "arguments.h"

namespace {

// From a residual to its rows' experts: everything of a layer that no collective interrupts when
// heads are not split. What each part does is its own kernel's business; this is their order.
METHOD(attention_block) {
  interlace::Norm<T> before = {}, after = {};
  interlace::Product<T> qkv = {}, o = {}, router = {};
  interlace::Heads<T> heads = {};
  interlace::Attention<T> attention = {};
  interlace::Choice<T> choice = {};
  after.sum = next.at<T>();
  after.out = next.at<T>();
  choice.ids = next.at<int64_t>();
  choice.weights = next.at<float>();
  after.x = before.x = next.at<const T>();
  const int64_t rows = next.size();
  heads.cos = next.at<const float>();
  heads.sin = next.at<const float>();
  heads.slots = next.at<const int64_t>();
  attention.pages = heads.pages = next.at<T>();
  attention.tables = next.at<const int64_t>();
  attention.tables_stride = next.size();
  attention.starts = next.at<const int64_t>();
  attention.positions = next.at<const int64_t>();
  attention.sequences = next.size();
  const int64_t hidden = next.size();
  before.weight = next.at<const T>();
  qkv.packed = next.at<const T>();
  heads.norm = next.at<const T>();
  attention.heads = heads.heads = next.size();
  attention.kv_heads = heads.kv_heads = next.size();
  attention.width = heads.width = next.size();
  attention.scale = next.real();
  o.packed = next.at<const T>();
  after.weight = next.at<const T>();
  router.packed = next.at<const T>();
  choice.experts = next.size();
  choice.top_k = next.size();
  choice.normalise = next.size() != 0;
  choice.scale = next.real();
  after.factor = next.real();
  after.eps = before.eps = heads.eps = next.real();
  if (!next.good()) return nullptr;
  const int64_t width = heads.heads * heads.width;
  qkv.outputs = width + 2 * heads.kv_heads * heads.width;
  const int64_t row_size = hidden + qkv.outputs + 2 * width + hidden + choice.experts;
  const size_t size = static_cast<size_t>(rows * row_size) * sizeof(T);
  auto *scratch = static_cast<T *>(std::aligned_alloc(64, (size + 64) / 64 * 64));
  if (scratch == nullptr) return PyErr_NoMemory();
  before.out = scratch;
  qkv.out = before.out + rows * hidden;
  heads.queries = qkv.out + rows * qkv.outputs;
  attention.out = heads.queries + rows * width;
  o.out = attention.out + rows * width;
  router.out = o.out + rows * hidden;
  before.rows = after.rows = qkv.rows = o.rows = router.rows = rows;
  heads.rows = choice.rows = rows;
  before.x_stride = after.x_stride = before.width = after.width = hidden;
  qkv.x = before.out, qkv.x_stride = qkv.inputs = hidden, qkv.out_stride = qkv.outputs;
  heads.qkv = qkv.out, heads.qkv_stride = qkv.outputs;
  attention.queries = heads.queries;
  o.x = attention.out, o.x_stride = o.inputs = width, o.out_stride = o.outputs = hidden;
  after.y = o.out;
  router.x = after.out, router.x_stride = router.inputs = hidden;
  router.out_stride = router.outputs = choice.experts;
  choice.logits = router.out, choice.logits_stride = choice.experts;
  bool good = true;
  Py_BEGIN_ALLOW_THREADS;
  kernels.norm(before);
  good = kernels.multiply(qkv) && kernels.turn_heads(heads) && kernels.attend(attention) &&
         kernels.multiply(o);
  if (good) {
    kernels.norm(after);
    good = kernels.multiply(router) && kernels.choose(choice);
  }
  Py_END_ALLOW_THREADS;
  std::free(scratch);
  return done(good);
}

}  // namespace
