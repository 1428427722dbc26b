// The kernels with AVX-512, but for products of bfloat16, which matrix tiles (AMX) multiply.

#include "common.h"

#if defined(__x86_64__) && defined(__linux__) && __has_include(<amxbf16intrin.h>)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace interlace {

bool ask_for_tiles() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned bf16_on_tiles = 1u << 22, tiles = 1u << 24;
  if ((edx & bf16_on_tiles) == 0 || (edx & tiles) == 0) return false;
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

}  // namespace interlace

// To the end of the file: templates take the target of the place where they are made.
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")

namespace interlace {
namespace {

#include "scratch.h"
#include "vectors_avx512.h"
//
#include "staged_as_is.h"
//
#include "packed.h"
#include "sums_amx.h"
//
#include "product.h"
//
#include "attention.h"

// Tiles are a thread's, and nobody else's who computes in it: they are given back after each call.
template <class Job, bool (*kernel)(const Job &)>
bool on_tiles(const Job &job) {
  const bool good = kernel(job);
  _tile_release();
  return good;
}

Kernels table() {
  Kernels kernels = *avx512_wide_kernels();
  kernels.name = "AMX BF16";
  kernels.of_bf16.multiply = on_tiles<Product<bf16>, multiply<bf16>>;
  kernels.of_bf16.experts = on_tiles<ExpertPass<bf16>, experts<bf16>>;
  kernels.of_bf16.attend = on_tiles<Attention<bf16>, attend<bf16>>;
  return kernels;
}

}  // namespace

const Kernels *amx_kernels() {
  static const Kernels kernels = table();
  return &kernels;
}

}  // namespace interlace

#else

namespace interlace {

bool ask_for_tiles() { return false; }
const Kernels *amx_kernels() { return nullptr; }

}  // namespace interlace

#endif
