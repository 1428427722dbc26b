// What an instruction set offers to the module: one table of functions over raw pointers.
//
// All matrices are bfloat16, all sums float32. An output element is one sum over its inputs in
// ascending order, whatever the number of rows: that is what makes equal rows equal bits.

#pragma once

#include <cstddef>
#include <cstdint>

namespace interlace {

using bf16 = uint16_t;

constexpr int64_t UNIT = 16;   // columns that are summed side by side; outputs are padded to it
constexpr int64_t BLOCK = 64;  // positions of a block of the KV cache

// x_TK times a packed weight_NK: out_TN. Strides count elements.
struct Product {
  bf16 *out;
  int64_t out_stride;
  const bf16 *x;
  int64_t x_stride;
  int64_t rows, outputs, inputs;
  const bf16 *packed;
};

// Rows sorted by expert through down(silu(gate(x)) * up(x)).
struct ExpertPass {
  bf16 *out;  // [rows, hidden]
  const bf16 *x;
  int64_t x_stride;
  int64_t hidden, width;
  int64_t experts;
  const int64_t *counts;          // rows of each expert
  const bf16 *const *matrices;    // gate and up interleaved, then down, of each expert
};

struct Norm {
  bf16 *out;  // [rows, width]
  bf16 *sum;  // [rows, width]; null: x is normalised as it is, otherwise x + factor * y
  const bf16 *x;
  int64_t x_stride;
  const bf16 *y;
  const bf16 *weight;
  int64_t rows, width;
  float eps, factor;
};

struct Choice {
  int64_t *ids;    // [rows, top_k]
  float *weights;  // [rows, top_k]
  const bf16 *logits;
  int64_t logits_stride;
  int64_t rows, experts, top_k;
  bool normalise;
  float scale;
};

struct Mix {
  bf16 *out;             // [rows, width]
  const bf16 *outputs;   // [rows, top_k, width]
  const float *weights;  // [rows, top_k]
  int64_t rows, top_k, width;
};

// Queries and keys normalised and rotated; keys and values put into their pages.
struct Heads {
  bf16 *queries;  // [rows, heads, width]
  const bf16 *qkv;
  int64_t qkv_stride;
  const bf16 *norm;          // [heads + kv_heads, width] or null
  const float *cos, *sin;    // [rows, width]; sin is negative in the first half
  const int64_t *slots;      // [rows] block * 64 + offset
  bf16 *pages;               // [blocks, kv_heads, key page and value page]
  int64_t rows, heads, kv_heads, width;
  float eps;
};

struct Attention {
  bf16 *out;            // [rows, heads, width]
  const bf16 *queries;  // [rows, heads, width]
  const bf16 *pages;    // [blocks, kv_heads, key page and value page]
  const int64_t *tables;
  int64_t tables_stride;
  const int64_t *starts;     // [sequences + 1] rows where a sequence starts and ends
  const int64_t *positions;  // [rows], ascending within a sequence
  int64_t sequences, heads, kv_heads, width;
  float scale;
};

// Functions that need memory of their own return whether they got it.
struct Kernels {
  const char *name;
  int64_t panel;  // columns that lie side by side in packed memory
  void (*pack)(bf16 *to, const bf16 *from, int64_t outputs, int64_t inputs, int64_t output_stride,
               int64_t input_stride);
  bool (*multiply)(const Product &);
  bool (*experts)(const ExpertPass &);
  void (*norm)(const Norm &);
  bool (*choose)(const Choice &);
  void (*mix)(const Mix &);
  bool (*turn_heads)(const Heads &);
  bool (*attend)(const Attention &);
};

// Null where the compiler builds for another processor. Whether this one can run them is to be asked
// before they are called.
const Kernels *avx2_kernels();
const Kernels *avx512_kernels();

}  // namespace interlace
