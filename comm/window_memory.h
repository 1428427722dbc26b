// A window's memory, doorbells, and what is done with a message of it: begun, released, looked at.
//
// Where everything lies is said in window_layout.py, and a test compares it with the constants here.
// Acquire and release on the flags order the plain copies between them.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <initializer_list>

#include <linux/futex.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "crossing.h"

#define FAST(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function))

namespace {

using interlace::CANARY;
using interlace::Crossing;
using interlace::Message;
using interlace::MISMATCH;
using interlace::Moments;
using interlace::NOT_THERE;
using interlace::OVERWRITTEN;

constexpr Py_ssize_t LINE = 64, PAGE = 4096, CANARY_BYTES = 8;
constexpr int GATHER = 1, EXCHANGE = 2;
constexpr uint64_t MAGIC_VALUE = 0x6563616C7265746EULL, CANARY_VALUE = 0x9E3779B97F4A7C15ULL;
constexpr Py_ssize_t MAX_MEMBERS = 1024;
constexpr Py_ssize_t LONG_COPY = 64 * 1024;  // from here on other threads may run meanwhile

struct Header {
  uint64_t released;
  uint64_t begun;
  uint64_t magic;
  int64_t visible_at;
  uint32_t path;
  uint32_t role;
  uint32_t stage;
  uint32_t kind;
  int64_t epoch;
  int64_t comm_seq;
  int64_t seq;
  uint64_t num_bytes;
  uint64_t num_members;
  uint64_t counts[];
};

struct Bell {
  uint32_t bell;
  uint32_t sleeping;
};

Py_ssize_t rounded(Py_ssize_t size, Py_ssize_t to) { return (size + to - 1) / to * to; }
Py_ssize_t header_bytes(Py_ssize_t members) {
  return rounded(offsetof(Header, counts) + 8 * members, LINE);
}
Py_ssize_t slot_bytes(Py_ssize_t members, Py_ssize_t capacity) {
  return rounded(header_bytes(members) + capacity + CANARY_BYTES, PAGE);
}
uint64_t canary(int64_t comm_seq) {
  return CANARY_VALUE ^ (static_cast<uint64_t>(comm_seq) * MAGIC_VALUE);
}

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{1000000000} * time.tv_sec + time.tv_nsec;
}

long futex(uint32_t *word, int op, uint32_t value, const timespec *timeout) {
  return syscall(SYS_futex, word, op, value, timeout, nullptr, 0);
}

void ring(Bell *bell) {
  // Sequentially consistent on both sides: either the sleeper sees the new count, or it is seen
  // asleep here.
  __atomic_add_fetch(&bell->bell, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&bell->sleeping, __ATOMIC_SEQ_CST)) {
    futex(&bell->bell, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

bool integers(PyObject *sequence, Py_ssize_t size, uint64_t *into) {
  PyObject *fast = PySequence_Fast(sequence, "counts must be a sequence");
  if (fast == nullptr) return false;
  bool good = PySequence_Fast_GET_SIZE(fast) == size;
  if (!good) {
    PyErr_Format(PyExc_ValueError, "%zd counts for %zd members", PySequence_Fast_GET_SIZE(fast),
                 size);
  }
  PyObject **items = PySequence_Fast_ITEMS(fast);
  for (Py_ssize_t nth = 0; good && nth < size; nth++) {
    into[nth] = PyLong_AsUnsignedLongLong(items[nth]);
    good = !(into[nth] == static_cast<uint64_t>(-1) && PyErr_Occurred());
  }
  Py_DECREF(fast);
  return good;
}

bool numbers(PyObject *const *args, Py_ssize_t size, int64_t *into) {
  for (Py_ssize_t nth = 0; nth < size; nth++) {
    into[nth] = PyLong_AsLongLong(args[nth]);
    if (into[nth] == -1 && PyErr_Occurred()) return false;
  }
  return true;
}

bool arity(Py_ssize_t found, Py_ssize_t least, Py_ssize_t most) {
  if (least <= found && found <= most) return true;
  PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", found, most);
  return false;
}

// An address, or a buffer that is held while this lives.
class Place {
 public:
  ~Place() {
    if (held_.obj != nullptr) PyBuffer_Release(&held_);
  }
  bool find(PyObject *place, uint64_t num_bytes, int flags) {
    if (PyLong_Check(place)) {
      address = static_cast<char *>(PyLong_AsVoidPtr(place));
      return !PyErr_Occurred();
    }
    if (PyObject_GetBuffer(place, &held_, flags) != 0) return false;
    address = static_cast<char *>(held_.buf);
    if (static_cast<uint64_t>(held_.len) >= num_bytes) return true;
    PyErr_Format(PyExc_ValueError, "a buffer of %zd bytes where %llu are needed", held_.len,
                 static_cast<unsigned long long>(num_bytes));
    return false;
  }
  char *address = nullptr;

 private:
  Py_buffer held_ = {};
};

class Buffers {
 public:
  ~Buffers() { release(); }
  bool hold(PyObject *sequence, Py_ssize_t least) {
    PyObject *fast = PySequence_Fast(sequence, "a sequence of buffers is needed");
    if (fast == nullptr) return false;
    bool good = true;
    Py_ssize_t size = PySequence_Fast_GET_SIZE(fast);
    held_ = new Py_buffer[size > 0 ? size : 1];
    for (Py_ssize_t nth = 0; good && nth < size; nth++) {
      PyObject *item = PySequence_Fast_GET_ITEM(fast, nth);
      good = PyObject_GetBuffer(item, &held_[nth], PyBUF_WRITABLE) == 0;
      if (!good) break;
      count = nth + 1;
      if (held_[nth].len < least) {
        PyErr_Format(PyExc_ValueError, "%zd bytes where %zd are needed", held_[nth].len, least);
        good = false;
      }
    }
    Py_DECREF(fast);
    return good;
  }
  void release() {
    for (Py_ssize_t nth = 0; nth < count; nth++) PyBuffer_Release(&held_[nth]);
    delete[] held_;
    held_ = nullptr;
    count = 0;
  }
  template <typename T>
  T *at(Py_ssize_t nth) const {
    return static_cast<T *>(held_[nth].buf);
  }
  Py_ssize_t count = 0;

 private:
  Py_buffer *held_ = nullptr;
};

// ---- Window

struct Window {
  PyObject_HEAD
  Buffers *memories;
  Buffers *bells;
  Py_ssize_t me, slots, capacity, head, stride;
  uint32_t path, role;
};

Header *slot_of(Window *self, Py_ssize_t member, int64_t slot) {
  return reinterpret_cast<Header *>(self->memories->at<char>(member) + slot * self->stride);
}

bool usable(Window *self, int64_t slot) {
  if (self->memories->count == 0) {
    PyErr_SetString(PyExc_ValueError, "the window is closed");
    return false;
  }
  if (0 <= slot && slot < self->slots) return true;
  PyErr_Format(PyExc_ValueError, "slot %lld of %zd", static_cast<long long>(slot), self->slots);
  return false;
}

// slot, comm_seq, epoch, seq, stage, kind
Message message_of(const int64_t *n) {
  return {n[0], n[1], n[2], n[3], static_cast<uint32_t>(n[4]), static_cast<uint32_t>(n[5])};
}

uint64_t flag_of(const Message &message) { return static_cast<uint64_t>(message.comm_seq) + 1; }

// Where the message's payload goes, which from here on is no other message's.
char *begun(Window *self, const Message &message) {
  Header *header = slot_of(self, self->me, message.slot);
  __atomic_store_n(&header->begun, flag_of(message), __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  return reinterpret_cast<char *>(header) + self->head;
}

// Its payload is there: others may read it.
void release(Window *self, const Message &message, const uint64_t *counts, uint64_t num_bytes,
             int64_t visible_at) {
  Header *header = slot_of(self, self->me, message.slot);
  const uint64_t end = canary(message.comm_seq);
  std::memcpy(reinterpret_cast<char *>(header) + self->head + num_bytes, &end, CANARY_BYTES);
  header->magic = MAGIC_VALUE;
  __atomic_store_n(&header->visible_at, visible_at, __ATOMIC_RELAXED);
  header->path = self->path;
  header->role = self->role;
  header->stage = message.stage;
  header->kind = message.kind;
  header->epoch = message.epoch;
  header->comm_seq = message.comm_seq;
  header->seq = message.seq;
  header->num_bytes = num_bytes;
  header->num_members = self->memories->count;
  std::memcpy(header->counts, counts, sizeof(uint64_t) * self->memories->count);
  __atomic_store_n(&header->released, flag_of(message), __ATOMIC_RELEASE);
  for (Py_ssize_t nth = 0; nth < self->bells->count; nth++) ring(self->bells->at<Bell>(nth));
}

// When everybody's message can be taken: 0 for now, -1 where one is missing.
int64_t visible(Window *self, const Message &message) {
  int64_t last = 0;
  for (Py_ssize_t member = 0; member < self->memories->count; member++) {
    Header *header = slot_of(self, member, message.slot);
    if (__atomic_load_n(&header->released, __ATOMIC_ACQUIRE) < flag_of(message)) return -1;
    if (member != self->me) {
      const int64_t at = __atomic_load_n(&header->visible_at, __ATOMIC_RELAXED);
      if (at > last) last = at;
    }
  }
  return last != 0 && last > now_ns() ? last : 0;
}

bool intact(Window *self, const Message &message, Py_ssize_t member) {
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  Header *found = slot_of(self, member, message.slot);
  return __atomic_load_n(&found->begun, __ATOMIC_RELAXED) == flag_of(message);
}

// A member's part for this one, of which `owed` bytes are expected: 0, or what is wrong.
int look(Window *self, const Message &message, Py_ssize_t member, uint64_t owed,
         const char **part) {
  Header *found = slot_of(self, member, message.slot);
  const uint64_t released = __atomic_load_n(&found->released, __ATOMIC_ACQUIRE);
  if (released < flag_of(message)) return NOT_THERE;
  if (released > flag_of(message) ||
      __atomic_load_n(&found->begun, __ATOMIC_RELAXED) != flag_of(message)) {
    return OVERWRITTEN;
  }
  if (found->magic != MAGIC_VALUE) return CANARY;
  const Py_ssize_t members = self->memories->count;
  if (found->path != self->path || found->role != self->role || found->stage != message.stage ||
      found->kind != message.kind || found->epoch != message.epoch ||
      found->comm_seq != message.comm_seq || found->seq != message.seq ||
      found->num_members != static_cast<uint64_t>(members)) {
    return MISMATCH;
  }
  uint64_t skipped = 0;
  for (Py_ssize_t nth = 0; message.kind != GATHER && nth < self->me; nth++) {
    skipped += found->counts[nth];
  }
  const uint64_t num_bytes = found->num_bytes;
  if (found->counts[self->me] != owed || skipped + owed > num_bytes) return MISMATCH;
  const char *data = reinterpret_cast<char *>(found) + self->head;
  uint64_t end = 0;
  if (num_bytes <= static_cast<uint64_t>(self->capacity)) {
    std::memcpy(&end, data + num_bytes, CANARY_BYTES);
  }
  if (num_bytes > static_cast<uint64_t>(self->capacity) || end != canary(message.comm_seq)) {
    return CANARY;
  }
  *part = data + skipped;
  return 0;
}

void window_dealloc(Window *self);

}  // namespace
