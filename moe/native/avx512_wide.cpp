// The kernels with AVX-512, which multiply bfloat16 as float32.

#include "common.h"

#if defined(__x86_64__)

#include <immintrin.h>

// To the end of the file: templates take the target of the place where they are made.
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

namespace interlace {
namespace {

#include "scratch.h"
#include "vectors_avx512.h"
//
#include "staged_wide.h"
#include "tiles_wide.h"
//
#include "tiles_avx512.h"
//
#include "whole_table.h"

constexpr Kernels TABLE = {"AVX-512", PANEL, OF<bf16>, OF<float>};

}  // namespace

const Kernels *avx512_wide_kernels() { return &TABLE; }

}  // namespace interlace

#else

namespace interlace {

const Kernels *avx512_wide_kernels() { return nullptr; }

}  // namespace interlace

#endif
