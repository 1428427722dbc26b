// What every instruction set's kernels are built from. Included outside of target regions, so that
// no inline function of the standard library is ever compiled for more than the base processor.

#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace interlace {

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LOG2_E_REST = 1.92596299e-8f;  // what float32 leaves out of it
constexpr float LEAST_EXPONENT = -126.0f, MOST_EXPONENT = 126.0f;
constexpr float MOST_POWER = 87.0f;  // of e, either way

// 2^x on [-1/2, 1/2] by its Taylor series, highest power first: off by less than 6e-9 of itself,
// which float32 cannot show, and exactly one at zero.
constexpr int NUM_EXP2_TERMS = 8;
constexpr float EXP2_TERMS[NUM_EXP2_TERMS] = {
    1.52527338e-5f, 1.54035304e-4f, 1.33335581e-3f, 9.61812911e-3f,
    5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f,
};

// Inputs of a float32 product that are summed one after another.
constexpr int64_t STRETCH = 128;

// Bytes of staged rows that share the second-level cache with the columns that pass by.
constexpr int64_t BLOCK_BYTES = 192 * 1024;

// Bytes of a panel that is asked for while the one before it is multiplied: both stay in the
// second-level cache.
constexpr int64_t ASKED_BYTES = 128 * 1024;

}  // namespace interlace
