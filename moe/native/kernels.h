// What an instruction set offers to the module: one table of functions over raw pointers.
//
// T is the type of all matrices, bfloat16 or float32; all sums are float32. An output element is
// summed over its inputs in one order, whatever the number of rows: that is what makes equal rows
// equal bits.

#pragma once

#include <cstddef>
#include <cstdint>

namespace interlace {

using bf16 = uint16_t;

constexpr int64_t UNIT = 16;   // columns that are summed side by side; outputs are padded to it
constexpr int64_t BLOCK = 64;  // positions of a block of the KV cache

// Whom a kernel asks between small parts of its work, some tens of microseconds each, whether to stand
// aside: the call comes back when it is to go on, and says whether anything else was computed.
struct Aside {
  bool (*stand)(Aside *);
};

// x_TK times a packed weight_NK: out_TN. Strides count elements.
template <class T>
struct Product {
  T *out;
  int64_t out_stride;
  const T *x;
  int64_t x_stride;
  int64_t rows, outputs, inputs;
  const T *packed;
  Aside *aside = nullptr;  // null: nobody else waits
};

// Rows sorted by expert through down(silu(gate(x)) * up(x)).
template <class T>
struct ExpertPass {
  T *out;
  int64_t out_stride;
  const T *x;
  int64_t x_stride;
  const int64_t *reads;   // how many strides behind `x` each is; null: they lie in their order
  const int64_t *writes;  // how many strides behind `out` its output goes; null: in their order
  int64_t hidden, width;
  int64_t experts;
  const int64_t *counts;          // rows of each expert
  const T *const *matrices;    // gate and up interleaved, then down, of each expert
  Aside *aside = nullptr;         // null: nobody else waits
};

template <class T>
struct Norm {
  T *out;  // [rows, width]
  T *sum;  // [rows, width]; null: x is normalised as it is, otherwise x + factor * y
  const T *x;
  int64_t x_stride;
  const T *y;
  const T *weight;
  int64_t rows, width;
  float eps, factor;
};

template <class T>
struct Choice {
  int64_t *ids;    // [rows, top_k]
  float *weights;  // [rows, top_k]
  const T *logits;
  int64_t logits_stride;
  int64_t rows, experts, top_k;
  bool normalise;
  float scale;
};

template <class T>
struct Mix {
  T *out;                 // [rows, width]
  const T *residual;      // [rows, width]; null: out is the sum alone, otherwise x + factor * it
  const T *outputs;       // rows of `width`
  int64_t stride;         // what places count, in elements
  const int64_t *places;  // [rows, top_k] where the outputs are that are a row's
  const float *weights;   // [rows, top_k]
  int64_t rows, top_k, width;
  float factor;
};

// Queries and keys normalised and rotated; keys and values put into their pages.
template <class T>
struct Heads {
  T *queries;  // [rows, heads, width]
  const T *qkv;
  int64_t qkv_stride;
  const T *norm;          // [heads + kv_heads, width] or null
  const float *cos, *sin;    // [rows, width]; sin is negative in the first half
  const int64_t *slots;      // [rows] block * 64 + offset
  T *pages;               // [blocks, kv_heads, key page and value page]
  int64_t rows, heads, kv_heads, width;
  float eps;
};

template <class T>
struct Attention {
  T *out;            // [rows, heads, width]
  const T *queries;  // [rows, heads, width]
  const T *pages;    // [blocks, kv_heads, key page and value page]
  const int64_t *tables;
  int64_t tables_stride;
  const int64_t *starts;     // [sequences + 1] rows where a sequence starts and ends
  const int64_t *positions;  // [rows], ascending within a sequence
  int64_t sequences, heads, kv_heads, width;
  float scale;
  Aside *aside = nullptr;  // null: nobody else waits
};

// Functions that need memory of their own return whether they got it.
template <class T>
struct KernelsOf {
  void (*pack)(T *to, const T *from, int64_t outputs, int64_t inputs, int64_t output_stride,
               int64_t input_stride);
  bool (*multiply)(const Product<T> &);
  bool (*experts)(const ExpertPass<T> &);
  void (*norm)(const Norm<T> &);
  bool (*choose)(const Choice<T> &);
  void (*mix)(const Mix<T> &);
  bool (*turn_heads)(const Heads<T> &);
  bool (*attend)(const Attention<T> &);
};

struct Kernels {
  const char *name;
  int64_t panel;  // columns that lie side by side in packed memory
  KernelsOf<bf16> of_bf16;
  KernelsOf<float> of_float32;
};

// Null where the compiler builds for another processor. Whether this one can run them is to be asked
// before they are called.
const Kernels *avx2_kernels();
const Kernels *avx512_kernels();
const Kernels *avx512_wide_kernels();
const Kernels *amx_kernels();

// Whether this processor has matrix tiles for bfloat16 and the system lets this process use them; from
// then on it may. To be asked before `amx_kernels` are called.
bool ask_for_tiles();

}  // namespace interlace
