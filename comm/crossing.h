// A stretch of one window's collectives, for code that computes between them without coming back.
//
// Who crosses fills a message in the sender's slot, where it will be read, and reads what others sent
// where it lies. What is checked is what `take` checks: every header, the canary, and that nobody
// wrote over the message before it was read. Messages are crossed in their order, each by
//   begin, fill, release   then   arrived, look at every member's, leave.
// The rule of two slots holds as ever: nobody begins message k + 1 before all have sent k.

#pragma once

#include <cstdint>

namespace interlace {

// What all members' headers must say.
struct Message {
  int64_t slot, comm_seq, epoch, seq;
  uint32_t stage, kind;
};

// Nanoseconds of the host's monotonic clock.
struct Moments {
  int64_t resumed;  // the computation up to it began
  int64_t computed, posted, settled;
  int64_t waited;  // of the time between posted and settled, with nothing to compute
};

struct WindowFunctions {
  // Where the payload goes; null if it does not fit.
  char *(*begin)(void *window, const Message &message, uint64_t num_bytes);
  // `counts` bytes of it are for each member. Rings.
  void (*release)(void *window, const Message &message, const uint64_t *counts, uint64_t num_bytes);
  bool (*arrived)(void *window, const Message &message, int64_t spin_ns);
  // The part of a member's message that is for this one: 0, or what is wrong with it.
  int (*look)(void *window, const Message &message, int64_t member, uint64_t owed,
              const char **part);
  // Whether it still is the same message.
  bool (*intact)(void *window, const Message &message, int64_t member);
  int64_t (*now)();
};

// What may be wrong with a message; the last only where it is crossed.
constexpr int NOT_THERE = 1, OVERWRITTEN = 2, MISMATCH = 3, CANARY = 4, OVER_CAPACITY = 5;

struct Crossing {
  const WindowFunctions *functions;
  void *window;
  int64_t members, me, num;
  const Message *messages;
  Moments *moments;
  int64_t spin_ns;
  int64_t at;  // the message that is being crossed
  int64_t resumed;  // when the computation up to it began
  int64_t asked;    // since when nothing is left to do but to wait for it; 0: there is
  // What was wrong with it, at which member, and the bytes that were owed or did not fit.
  int fault;
  int64_t member;
  uint64_t num_bytes;

  char *begin(int64_t nth, uint64_t size) {
    char *place = nth < num ? functions->begin(window, messages[nth], size) : nullptr;
    if (place == nullptr) at = nth, fault = OVER_CAPACITY, member = me, num_bytes = size;
    return place;
  }
  // `computed`: when the computation was over; 0: now.
  void release(const uint64_t *counts, uint64_t size, int64_t computed = 0) {
    Moments &of = moments[at];
    of.resumed = resumed;
    of.computed = computed == 0 ? functions->now() : computed;
    functions->release(window, messages[at], counts, size);
    of.posted = functions->now();
  }
  bool arrived() {
    if (asked == 0) asked = functions->now();
    if (!functions->arrived(window, messages[at], spin_ns)) return false;
    Moments &of = moments[at];
    of.settled = resumed = functions->now();
    of.waited = of.settled - asked;
    asked = 0;
    return true;
  }
  bool look(int64_t whose, uint64_t owed, const char **part) {
    const int found = functions->look(window, messages[at], whose, owed, part);
    if (found != 0) fault = found, member = whose, num_bytes = owed;
    return found == 0;
  }
  // To be called once what was looked at has been used.
  bool leave() {
    for (int64_t whose = 0; whose < members; whose++) {
      if (functions->intact(window, messages[at], whose)) continue;
      fault = OVERWRITTEN, member = whose, num_bytes = 0;
      return false;
    }
    at++;
    return true;
  }
};

}  // namespace interlace
