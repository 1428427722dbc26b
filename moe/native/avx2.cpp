// The kernels with AVX2 and FMA.

#include "common.h"

#if defined(__x86_64__)

#include <immintrin.h>

// To the end of the file: templates take the target of the place where they are made.
#pragma GCC target("avx2,fma")

namespace interlace {
namespace {

#include "scratch.h"
#include "vectors_avx2.h"
//
#include "staged_wide.h"
//
#include "whole_table.h"

constexpr Kernels TABLE = {"AVX2", PANEL, OF<bf16>, OF<float>};

}  // namespace

const Kernels *avx2_kernels() { return &TABLE; }

}  // namespace interlace

#else

namespace interlace {

const Kernels *avx2_kernels() { return nullptr; }

}  // namespace interlace

#endif
