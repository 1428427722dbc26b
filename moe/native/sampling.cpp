// A token is the largest of log-probability plus noise, as in sampler.py; found in three passes.
//
// Sums of exponentials here and there differ in their last bits. So all that could depend on such
// a difference is noticed (`slack`), and left to the reference.

#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")  // no bit depends on it: see above
#define EVERY_WIDTH __attribute__((target_clones("default", "avx2,fma", "arch=x86-64-v4")))
#else
#define EVERY_WIDTH
#endif

namespace interlace {
namespace {

constexpr int LANES = 32;        // partial sums
constexpr int64_t RUN = 1024;    // of so many exponentials, then they are added up
constexpr int64_t BLOCK = 256;   // of noise, that stays in the first-level cache
constexpr double ULP = 0x1p-52;
constexpr double ROUNDING = 1e-9;  // far more than rounding does to the bounds of a candidate
constexpr int MOST_CANDIDATES = 64;

// e to the x, for x <= 0, to two units in the last place; below -708 as for -708.
inline __attribute__((always_inline)) double exponential(double x) {
  constexpr double SHIFT = 0x1.8p52;
  x = x < -708.0 ? -708.0 : x;
  const double shifted = x * 0x1.71547652b82fep0 + SHIFT, power = shifted - SHIFT;
  const double r = (x - power * 0x1.62e42fefa3800p-1) - power * 0x1.ef35793c76730p-45;
  double sum = 1.0 / 479001600.0;
  constexpr double FACTORIALS[] = {39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0,
                                   120.0,      24.0,      6.0,      2.0,     1.0,    1.0};
  for (double factorial : FACTORIALS) sum = sum * r + 1.0 / factorial;
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52;
  double scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return sum * scale;
}

// The largest of the logits; wrong if one of them is not a number.
EVERY_WIDTH float largest(const float *logits, int64_t size) {
  float lanes[LANES];
  for (float &lane : lanes) lane = logits[0];
  int64_t at = 0;
  for (; at + LANES <= size; at += LANES)
    for (int lane = 0; lane < LANES; lane++)
      lanes[lane] = logits[at + lane] > lanes[lane] ? logits[at + lane] : lanes[lane];
  for (; at < size; at++) lanes[0] = logits[at] > lanes[0] ? logits[at] : lanes[0];
  float most = lanes[0];
  for (float lane : lanes) most = lane > most ? lane : most;
  return most;
}

// Exponentials of (logits - peak) * factor into `weights`, and their sum.
EVERY_WIDTH double exponentials(double *weights, const float *logits, double peak, double factor,
                                int64_t size) {
  double total = 0;
  for (int64_t run = 0; run < size; run += RUN) {
    const int64_t end = run + RUN < size ? run + RUN : size;
    double lanes[LANES] = {};
    int64_t at = run;
    for (; at + LANES <= end; at += LANES)
      for (int lane = 0; lane < LANES; lane++) {
        weights[at + lane] = exponential((logits[at + lane] - peak) * factor);
        lanes[lane] += weights[at + lane];
      }
    for (; at < end; at++)
      lanes[0] += weights[at] = exponential((logits[at] - peak) * factor);
    for (int width = LANES / 2; width; width /= 2)
      for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    total += lanes[0];
  }
  return total;
}

// Whether any token of a block could get as far as `reached`.
EVERY_WIDTH bool any_gets_to(double reached, const double *weights, const double *uniform,
                             int64_t size) {
  int found = 0;
  for (int64_t at = 0; at < size; at++) found |= weights[at] >= reached * (1 - uniform[at]);
  return found != 0;
}

// The key, and the counter's second word; its first counts blocks of four tokens.
struct Noise {
  uint64_t key0, key1, position;
};

// Philox4x64-10 (Salmon et al. 2011), in numpy's order: the block's four numbers of 64 bits.
inline __attribute__((always_inline)) void philox(uint64_t *bits, const Noise &noise,
                                                  uint64_t block) {
  uint64_t a = 1 + block, b = noise.position, c = 0, d = 0;
  uint64_t k0 = noise.key0, k1 = noise.key1;
  for (int round = 0; round < 10; round++) {
    const unsigned __int128 one = static_cast<unsigned __int128>(a) * 0xD2E7470EE14C6C93u;
    const unsigned __int128 two = static_cast<unsigned __int128>(c) * 0xCA5A826395121157u;
    a = static_cast<uint64_t>(two >> 64) ^ b ^ k0;
    c = static_cast<uint64_t>(one >> 64) ^ d ^ k1;
    b = static_cast<uint64_t>(two);
    d = static_cast<uint64_t>(one);
    k0 += 0x9E3779B97F4A7C15u;
    k1 += 0xBB67AE8584CAA73Bu;
  }
  bits[0] = a, bits[1] = b, bits[2] = c, bits[3] = d;
}

inline __attribute__((always_inline)) double between_0_and_1(uint64_t bits) {
  return static_cast<double>(static_cast<int64_t>(bits >> 11)) * 0x1p-53 + 0x1p-54;
}

// The noise of BLOCK tokens from `start` on, a multiple of 4.
EVERY_WIDTH void fill(double *uniform, const Noise &noise, int64_t start) {
  uint64_t bits[BLOCK];
  for (int64_t at = 0; at < BLOCK; at += 4) philox(bits + at, noise, (start + at) / 4);
  for (int64_t at = 0; at < BLOCK; at++) uniform[at] = between_0_and_1(bits[at]);
}

// What is said of a row; token -1: nothing.
struct Drawn {
  int64_t token;
  double logprob_raw, logprob;
};

struct Candidates {
  int64_t tokens[MOST_CANDIDATES];
  double uniform[MOST_CANDIDATES];
  int count = 0;

  void add(int64_t token, double value) {
    if (count == MOST_CANDIDATES) return;
    tokens[count] = token;
    uniform[count++] = value;
  }
};

// How far a token gets at least.
double gets_to(double weight, double uniform) {
  return weight / -std::log(uniform) * (1 - ROUNDING);
}

// Tokens of which each could be the one: as -log u > 1 - u, none gets beyond weight / (1 - u), and
// whoever gets less far than another certainly does is not looked at.
Candidates with_noise(const double *weights, int64_t likeliest, const Noise &noise, int64_t size) {
  Candidates found;
  uint64_t bits[4];
  philox(bits, noise, likeliest / 4);
  double reached = gets_to(weights[likeliest], between_0_and_1(bits[likeliest % 4]));
  double uniform[BLOCK];
  for (int64_t start = 0; start < size; start += BLOCK) {
    const double *of = weights + start;
    const int64_t count = size - start < BLOCK ? size - start : BLOCK;
    fill(uniform, noise, start);
    if (!any_gets_to(reached, of, uniform, count)) continue;
    for (int64_t at = 0; at < count; at++) {
      if (!(of[at] >= reached * (1 - uniform[at]))) continue;
      found.add(start + at, uniform[at]);
      reached = std::max(reached, gets_to(of[at], uniform[at]));
    }
  }
  return found;
}

// Those with at least so large a logit, up to a `most` of them.
Candidates at_least(float least, const float *logits, int64_t size, int most) {
  Candidates found;
  for (int64_t start = 0; start < size && found.count < most; start += BLOCK) {
    const int64_t count = size - start < BLOCK ? size - start : BLOCK;
    if (largest(logits + start, count) < least) continue;
    for (int64_t at = start; at < start + count && found.count < most; at++)
      if (logits[at] >= least) found.add(at, 0.5);
  }
  return found;
}

// The float32 of a log-probability, whatever is within `slack` of it.
bool rounded(double *out, double value, double slack) {
  *out = static_cast<float>(value);
  return static_cast<float>(value - slack) == static_cast<float>(value + slack);
}

Drawn row(const float *logits, double temperature, const Noise &noise, int64_t size,
          double *weights) {
  const Drawn unknown{-1, 0.0, 0.0};
  const bool greedy = temperature == 0;
  const double factor = greedy ? 1.0 : 1.0 / temperature;
  const float peak = largest(logits, size);
  const double sum = exponentials(weights, logits, peak, 1.0, size);
  const double own_sum =
      factor == 1.0 ? sum : exponentials(weights, logits, peak, factor, size);
  if (!(sum >= 1 && std::isfinite(sum) && own_sum >= 1 && std::isfinite(own_sum))) return unknown;
  const Candidates few =
      greedy ? at_least(static_cast<float>(peak - ROUNDING), logits, size, MOST_CANDIDATES)
             : with_noise(weights, at_least(peak, logits, size, 1).tokens[0], noise, size);
  if (few.count == MOST_CANDIDATES) return unknown;  // there may be more

  const double log_sum = std::log(sum), own_log_sum = std::log(own_sum);
  double best = -INFINITY, next = -INFINITY;
  int64_t token = -1;
  for (int nth = 0; nth < few.count; nth++) {
    if (greedy && token >= 0 && logits[few.tokens[nth]] == logits[token]) continue;
    const double shifted = static_cast<double>(logits[few.tokens[nth]]) - peak;
    double score = shifted * factor - own_log_sum;
    if (!greedy) score -= std::log(-std::log(few.uniform[nth]));
    next = score > best ? best : score > next ? score : next;
    token = score > best ? few.tokens[nth] : token;
    best = score > best ? score : best;
  }
  if (token < 0) return unknown;
  const double shifted = static_cast<double>(logits[token]) - peak;
  const double raw = shifted - log_sum, own = shifted * factor - own_log_sum;
  const double sums = ULP * (96.0 + static_cast<double>(size / RUN));
  const double slack = sums + 8 * ULP * -raw;
  const double own_slack =
      factor == 1.0 ? slack : slack + 8 * ULP * (16 - own + (16 - raw) * factor);
  Drawn drawn{token, 0.0, 0.0};
  const bool sure = best - next > 4 * own_slack + 256 * ULP &&
                    rounded(&drawn.logprob_raw, raw, slack) &&
                    rounded(&drawn.logprob, own, own_slack);
  return sure ? drawn : unknown;
}

}  // namespace

void draw(double *out, const float *logits, const double *temperature, const uint64_t *noise,
          int64_t num_rows, int64_t size, double *weights) {
  for (int64_t nth = 0; nth < num_rows; nth++) {
    const uint64_t *of = noise + 3 * nth;
    const Drawn drawn =
        row(logits + nth * size, temperature[nth], {of[0], of[1], of[2]}, size, weights);
    out[3 * nth] = static_cast<double>(drawn.token);
    out[3 * nth + 1] = drawn.logprob_raw;
    out[3 * nth + 2] = drawn.logprob;
  }
}

}  // namespace interlace
