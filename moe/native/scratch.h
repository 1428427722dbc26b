// Small things every kernel needs; not from the standard library (see common.h).

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t greater(int64_t a, int64_t b) { return a < b ? b : a; }

// Inputs that lie side by side in a packed weight: what fills 32 bits.
template <class T>
constexpr int64_t RUN = 4 / static_cast<int64_t>(sizeof(T));

inline float real(float number) { return number; }
inline float real(bf16 number) {
  const uint32_t bits = static_cast<uint32_t>(number) << 16;
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

constexpr int64_t LINE_BYTES = 64;

// Memory that is read next: `lines` cache lines of it are asked for in each step of a sum, so that
// it is on its way while something else is multiplied. All at once they would make the sum wait.
struct Ahead {
  const char *at;
  int64_t lines;
};
constexpr Ahead NOTHING = {nullptr, 0};
inline void ask(Ahead &next) {
  for (int64_t line = 0; line < next.lines; line++) {
    __builtin_prefetch(next.at, 0, 2);  // into the second level
    next.at += LINE_BYTES;
  }
}
template <class T>
inline Ahead ahead(const T *at, int64_t lines) {
  return {reinterpret_cast<const char *>(at), lines};
}

inline bool stands_aside(Aside *aside) { return aside != nullptr && aside->stand(aside); }

// Memory of one call, on a cache line's boundary.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : memory_(std::aligned_alloc(64, (static_cast<size_t>(count) * sizeof(T) + 64) / 64 * 64)) {}
  ~Scratch() { std::free(memory_); }
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;
  bool good() const { return memory_ != nullptr; }
  T *get() const { return static_cast<T *>(memory_); }

 private:
  void *memory_;
};
