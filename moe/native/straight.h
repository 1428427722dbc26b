// A pass through all layers of experts in one call: blocks, experts, and between them the collectives
// of a crossing (comm/crossing.h), in the order of `Model.compute` and with its bits. Rows are dealt
// into the window, and experts read and write where rows lie in it.

#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../../comm/crossing.h"
#include "attention_block.h"
#include "dealing.h"

namespace {

using interlace::Crossing;

enum Outcome { THROUGH = 0, WAITS = 1, FAULT = 2, NO_MEMORY = 3, WRONG = 4, UNALIGNED = 5 };
enum Spent { BLOCK, DEALING, EXPERTS, SUMS, NUM_SPENT };

struct Free {
  void operator()(void *memory) const { std::free(memory); }
};

class Straight {
 public:
  virtual ~Straight() = default;
  // Computes as far as messages have come. The GIL is not needed.
  virtual Outcome go_on(Crossing &crossing) = 0;
  // The same for two passes side by side, this one first: their messages by turns, and the experts of
  // a layer in one pass over the rows of both. Both crossings are over as one.
  virtual Outcome go_on_beside(Crossing &crossing, Straight &other, Crossing &others) = 0;
  virtual size_t item_size() const = 0;
  int64_t spent[NUM_SPENT] = {};  // nanoseconds
};

template <class T>
struct StraightLayer {
  Block<T> block;
  std::vector<const T *> matrices;
};

template <class T>
class StraightOf : public Straight {
 public:
  explicit StraightOf(const interlace::KernelsOf<T> &kernels) : kernels_(kernels) {}

  // False with an error set.
  bool take(Arguments &next) {
    x_ = next.at<T>();
    ids_ = next.at<int64_t>();
    rows_ = next.size();
    Block<T> rows;
    rows.take_rows(next);
    const int64_t pages_size = next.size();  // elements of a layer's pages
    width_ = next.size();
    const int64_t *asked = next.at<const int64_t>();
    const int64_t num_asked = next.size();
    all_ = num_asked < 0;
    if (!all_) asked_.assign(asked, asked + num_asked);
    PyObject *owned = next.object(), *layers = next.object();
    const int64_t num = next.size();
    if (!next.good() || !take_owned(owned) || !take_layers(layers, num, rows, pages_size)) {
      return false;
    }
    hidden_ = layers_[0].block.before.width;
    top_k_ = layers_[0].block.choice.top_k;
    const int64_t size = layers_[0].block.scratch_size(rows_) + 2 * rows_ * hidden_;
    const size_t bytes = (static_cast<size_t>(size) * sizeof(T) + 64) / 64 * 64;
    memory_.reset(static_cast<T *>(std::aligned_alloc(64, bytes)));
    if (memory_ == nullptr) return PyErr_NoMemory() != nullptr;
    sum_ = memory_.get() + layers_[0].block.scratch_size(rows_);
    out_ = sum_ + rows_ * hidden_;
    weights_.resize(rows_ * top_k_);
    places_.resize(rows_ * top_k_);
    return true;
  }

  size_t item_size() const override { return sizeof(T); }

  Outcome go_on(Crossing &c) override {
    if (!is_of(c)) return WRONG;
    since_ = c.functions->now();
    for (;;) {
      if (waits_) {
        const int64_t began = c.functions->now();
        if (!c.arrived()) return WAITS;
        since_ += c.functions->now() - began;
        waits_ = false;
      }
      const Outcome outcome = step(c);
      if (outcome != WAITS) return outcome;  // otherwise: to the next wait
      waits_ = true;
    }
  }

  Outcome go_on_beside(Crossing &c, Straight &another, Crossing &d) override {
    if (another.item_size() != sizeof(T) || &another == this) return WRONG;
    auto &other = static_cast<StraightOf<T> &>(another);
    const bool alike = layers_.size() == other.layers_.size() && owned_ == other.owned_;
    if (!alike || !is_of(c) || !other.is_of(d)) return WRONG;
    for (; !other.over(); phase_ = phase_ == 7 ? 2 : phase_ + 1) {
      if (const Outcome outcome = beside(c, other, d); outcome != THROUGH) return outcome;
    }
    return THROUGH;
  }

 private:
  static constexpr Py_ssize_t NUM_OF_LAYER = 17;  // numbers of Block::take_layer
  static constexpr auto UNIT_BYTES = static_cast<intptr_t>(interlace::UNIT * sizeof(T));

  bool is_of(const Crossing &c) const {
    return c.members == static_cast<int64_t>(owned_.size()) &&
           c.num == 3 * static_cast<int64_t>(layers_.size());
  }

  bool over() const { return at_ == static_cast<int64_t>(layers_.size()); }

  // One phase of two passes: at most a wait, and what can be computed behind it.
  Outcome beside(Crossing &c, StraightOf<T> &other, Crossing &d) {
    const bool of_other = phase_ % 2 == 1;
    if (phase_ > 1 && !(of_other ? d : c).arrived()) return WAITS;
    switch (phase_) {
      case 0:
        return posted(c, &StraightOf<T>::counts);
      case 1:
        return other.posted(d, &StraightOf<T>::counts);
      case 2:
        return posted(c, &StraightOf<T>::rows);
      case 3:
        return other.posted(d, &StraightOf<T>::rows);
      case 4:
        return THROUGH;
      case 5:
        return outputs_of_both(c, other, d);
      case 6:
        return posted(c, &StraightOf<T>::mixed_and_counts);
      default:
        return other.posted(d, &StraightOf<T>::mixed_and_counts);
    }
  }

  // A computation that ends with a message.
  Outcome posted(Crossing &c, Outcome (StraightOf<T>::*compute)(Crossing &)) {
    since_ = c.resumed = c.functions->now();
    const Outcome outcome = (this->*compute)(c);
    return outcome == WAITS ? THROUGH : outcome;
  }

  Outcome mixed_and_counts(Crossing &c) {
    if (const Outcome outcome = mixed(c); outcome != THROUGH) return outcome;
    at_++;
    return over() ? THROUGH : counts(c);
  }

  // Numbers of each layer, eight bytes each: those of a block, then where its experts' matrices are.
  bool take_layers(PyObject *layers, int64_t num, const Block<T> &rows, int64_t pages_size) {
    const Py_ssize_t size = PyBytes_Check(layers) ? PyBytes_GET_SIZE(layers) : 0;
    if (num < 1 || size % (num * 8) != 0 || size / (num * 8) < NUM_OF_LAYER) {
      PyErr_SetString(PyExc_TypeError, "layers must be bytes of as many numbers each");
      return false;
    }
    Numbers next(PyBytes_AS_STRING(layers));
    for (int64_t nth = 0; nth < num; nth++) {
      StraightLayer<T> layer = {rows, {}};
      layer.block.attention.pages = layer.block.heads.pages += nth * pages_size;
      layer.block.take_layer(next);
      for (Py_ssize_t left = size / (num * 8) - NUM_OF_LAYER; left > 0; left--) {
        layer.matrices.push_back(next.at<const T>());
      }
      layers_.push_back(std::move(layer));
    }
    return true;
  }

  bool take_owned(PyObject *owned) {
    const Py_ssize_t num = PyTuple_Check(owned) ? PyTuple_GET_SIZE(owned) : 0;
    for (Py_ssize_t nth = 0; nth < num; nth++) {
      owned_.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(owned, nth)));
      if (owned_.back() == -1 && PyErr_Occurred()) return false;
      experts_ += owned_.back();
    }
    if (num > 0) return true;
    PyErr_SetString(PyExc_TypeError, "owned must be a tuple of every member's number of experts");
    return false;
  }

  void note(Crossing &c, Spent kind) {
    const int64_t now = c.functions->now();
    spent[kind] += now - since_;
    since_ = now;
  }

  Outcome step(Crossing &c) {
    switch (phase_++) {
      case 0:
        return counts(c);
      case 1:
        return rows(c);
      case 2:
        return outputs(c);
      default:
        phase_ = 0;
        if (Outcome outcome = mixed(c); outcome != THROUGH) return outcome;
        at_++;
        return over() ? THROUGH : step(c);
    }
  }

  int64_t *ids() { return ids_ + at_ * rows_ * top_k_; }

  // The layer up to its experts; how many rows go to each.
  Outcome counts(Crossing &c) {
    if (!layers_[at_].block.run(kernels_, rows_, x_, sum_, out_, ids(), weights_.data(),
                                memory_.get())) {
      return NO_MEMORY;
    }
    chosen_ = ids();
    if (!all_ && at_ + 1 == static_cast<int64_t>(layers_.size())) keep_asked();
    note(c, BLOCK);
    const int64_t experts = experts_, num_slots = rows_ * top_k_;
    next_.assign(experts + 1, 0);
    for (int64_t nth = 0; nth < num_slots; nth++) next_[chosen_[nth] + 1]++;
    std::vector<uint64_t> bytes;
    for (int64_t own : owned_) bytes.push_back(static_cast<uint64_t>(own) * 8);
    char *to = c.begin(c.at, static_cast<uint64_t>(experts) * 8);
    if (to == nullptr) return FAULT;
    std::memcpy(to, next_.data() + 1, static_cast<size_t>(experts) * 8);
    c.release(bytes.data(), static_cast<uint64_t>(experts) * 8);
    note(c, DEALING);
    return WAITS;
  }

  // From here on the pass has only the rows that are asked for.
  void keep_asked() {
    chosen_of_asked_.resize(asked_.size() * top_k_);
    rows_ = 0;
    for (int64_t row : asked_) {
      const size_t bytes = static_cast<size_t>(hidden_) * sizeof(T);
      std::memmove(sum_ + rows_ * hidden_, sum_ + row * hidden_, bytes);
      std::memmove(out_ + rows_ * hidden_, out_ + row * hidden_, bytes);
      for (int64_t nth = 0; nth < top_k_; nth++) {
        chosen_of_asked_[rows_ * top_k_ + nth] = chosen_[row * top_k_ + nth];
        weights_[rows_ * top_k_ + nth] = weights_[row * top_k_ + nth];
      }
      rows_++;
    }
    chosen_ = chosen_of_asked_.data();
  }

  // How many come from each member for each of the own experts; then the rows are sent.
  Outcome rows(Crossing &c) {
    const int64_t own = owned_[c.me];
    counts_.resize(c.members * own);
    received_.assign(c.members, 0);
    for (int64_t member = 0; member < c.members; member++) {
      const char *part;
      if (!c.look(member, static_cast<uint64_t>(own) * 8, &part)) return FAULT;
      std::memcpy(counts_.data() + member * own, part, static_cast<size_t>(own) * 8);
    }
    if (!c.leave()) return FAULT;
    for (int64_t nth = 0; nth < c.members * own; nth++) received_[nth / own] += counts_[nth];
    sent_.assign(c.members, 0);
    int64_t expert = 0;
    for (int64_t member = 0; member < c.members; member++) {
      for (int64_t left = owned_[member]; left > 0; left--) sent_[member] += next_[++expert];
    }
    add_up(next_.data(), experts_);
    const int64_t num_slots = rows_ * top_k_;
    char *to = c.begin(c.at, row_bytes(num_slots));
    if (to == nullptr) return FAULT;
    place_rows(to, places_.data(), next_.data(), reinterpret_cast<const char *>(out_),
               row_bytes(1), row_bytes(1), chosen_, num_slots, top_k_);
    release(c, sent_);
    note(c, DEALING);
    return WAITS;
  }

  // Every row's expert applied to it, from slot to slot.
  Outcome outputs(Crossing &c) {
    interlace::ExpertPass<T> pass = {};
    if (const Outcome outcome = arranged(c, pass); outcome != THROUGH) return outcome;
    note(c, DEALING);
    if (!writes_.empty() && !kernels_.experts(pass)) return NO_MEMORY;
    note(c, EXPERTS);
    return sent_back(c, 0);
  }

  // The same of two passes: an expert's matrices are read once, for the first one's rows and then for
  // the other's. So much of the time is each one's as there are rows of it.
  Outcome outputs_of_both(Crossing &c, StraightOf<T> &other, Crossing &d) {
    since_ = c.resumed = c.functions->now();
    interlace::ExpertPass<T> pass = {}, others = {};
    Outcome outcome = arranged(c, pass);
    if (outcome == THROUGH) outcome = other.arranged(d, others);
    if (outcome != THROUGH) return outcome;
    const intptr_t reads = between(others.x, pass.x), writes = between(others.out, pass.out);
    if (reads % UNIT_BYTES != 0 || writes % UNIT_BYTES != 0) return UNALIGNED;
    reads_of_both_.clear(), writes_of_both_.clear();
    totals_of_both_ = totals_;
    for (int64_t expert = 0, row = 0, other_row = 0; expert < pass.experts; expert++) {
      take_rows(*this, row, totals_[expert], 0, 0);
      take_rows(other, other_row, other.totals_[expert], reads / UNIT_BYTES, writes / UNIT_BYTES);
      row += totals_[expert], other_row += other.totals_[expert];
      totals_of_both_[expert] += other.totals_[expert];
    }
    pass.reads = reads_of_both_.data(), pass.writes = writes_of_both_.data();
    pass.counts = totals_of_both_.data();
    note(c, DEALING);
    const auto num_rows = static_cast<int64_t>(reads_of_both_.size());
    const auto own_rows = static_cast<int64_t>(reads_.size());
    if (num_rows > 0 && !kernels_.experts(pass)) return NO_MEMORY;
    const int64_t now = c.functions->now(), took = now - since_;
    const int64_t own = num_rows > 0 ? took * own_rows / num_rows : took;
    spent[EXPERTS] += own, other.spent[EXPERTS] += took - own;
    d.resumed = since_ + own;
    return sent_back(c, d.resumed) == FAULT || other.sent_back(d, now) == FAULT ? FAULT : THROUGH;
  }

  // Rows of an expert of either pass, as places behind those of this one.
  void take_rows(const StraightOf<T> &from, int64_t row, int64_t num, int64_t reads, int64_t writes) {
    for (const int64_t end = row + num; row < end; row++) {
      reads_of_both_.push_back(from.reads_[row] + reads);
      writes_of_both_.push_back(from.writes_[row] + writes);
    }
  }

  // Where the experts' rows are, and where their outputs go.
  Outcome arranged(Crossing &c, interlace::ExpertPass<T> &pass) {
    parts_.resize(c.members);
    for (int64_t member = 0; member < c.members; member++) {
      if (!c.look(member, row_bytes(received_[member]), &parts_[member])) return FAULT;
      if (between(parts_[member], parts_[0]) % UNIT_BYTES != 0) return UNALIGNED;
    }
    const int64_t own = owned_[c.me];
    arrived_.clear();
    for (int64_t member = 0; member < c.members; member++) {
      for (int64_t nth = 0; nth < received_[member]; nth++) {
        arrived_.push_back(place_of(member, nth));
      }
    }
    const auto num_rows = static_cast<int64_t>(arrived_.size());
    totals_.assign(own, 0);
    for (int64_t nth = 0; nth < c.members * own; nth++) totals_[nth % own] += counts_[nth];
    // Outputs go back as rows came.
    writes_.resize(num_rows);
    next_.assign(own + 1, 0);
    order_rows(writes_.data(), next_.data(), counts_.data(), c.members, own);
    reads_.clear();
    for (int64_t &row : writes_) {
      reads_.push_back(arrived_[row]);
      row *= hidden_ / interlace::UNIT;
    }
    char *to = c.begin(c.at + 1, row_bytes(num_rows));
    if (to == nullptr) return FAULT;
    pass.out = reinterpret_cast<T *>(to);
    pass.x = reinterpret_cast<const T *>(parts_[0]);
    pass.out_stride = pass.x_stride = interlace::UNIT;
    pass.reads = reads_.data(), pass.writes = writes_.data();
    pass.hidden = hidden_, pass.width = width_;
    pass.experts = own, pass.counts = totals_.data();
    pass.matrices = layers_[at_].matrices.data();
    return THROUGH;
  }

  Outcome sent_back(Crossing &c, int64_t computed) {
    if (!c.leave()) return FAULT;
    release(c, received_, computed);
    return WAITS;
  }

  // What came back, weighted, summed and added to the residual.
  Outcome mixed(Crossing &c) {
    for (int64_t member = 0; member < c.members; member++) {
      if (!c.look(member, row_bytes(sent_[member]), &parts_[member])) return FAULT;
      if (between(parts_[member], parts_[0]) % UNIT_BYTES != 0) return UNALIGNED;
    }
    const int64_t num_slots = rows_ * top_k_;
    ends_.clear();
    for (int64_t member = 0, end = 0; member < c.members; member++) ends_.push_back(end += sent_[member]);
    for (int64_t nth = 0; nth < num_slots; nth++) {
      int64_t member = 0;
      while (places_[nth] >= ends_[member]) member++;
      places_[nth] = place_of(member, places_[nth] - ends_[member] + sent_[member]);
    }
    interlace::Mix<T> mix = {};
    mix.out = x_;
    mix.residual = sum_;
    mix.outputs = reinterpret_cast<const T *>(parts_[0]);
    mix.stride = interlace::UNIT;
    mix.places = places_.data(), mix.weights = weights_.data();
    mix.rows = rows_, mix.top_k = top_k_, mix.width = hidden_;
    mix.factor = layers_[at_].block.after.factor;
    kernels_.mix(mix);
    note(c, SUMS);
    return c.leave() ? THROUGH : FAULT;
  }

  uint64_t row_bytes(int64_t num) const {
    return static_cast<uint64_t>(num * hidden_) * sizeof(T);
  }

  // Where the nth row of a member's part lies behind the first member's part, in units: slots begin
  // on pages and their payloads on lines, and rows are whole units.
  int64_t place_of(int64_t member, int64_t nth) const {
    return (between(parts_[member], parts_[0]) + static_cast<intptr_t>(row_bytes(nth))) / UNIT_BYTES;
  }

  // Bytes; they need not be of one object.
  static intptr_t between(const void *place, const void *begin) {
    return reinterpret_cast<intptr_t>(place) - reinterpret_cast<intptr_t>(begin);
  }

  void release(Crossing &c, const std::vector<int64_t> &num, int64_t computed = 0) {
    std::vector<uint64_t> bytes;
    uint64_t all = 0;
    for (int64_t rows : num) {
      bytes.push_back(row_bytes(rows));
      all += bytes.back();
    }
    c.release(bytes.data(), all, computed);
  }

  const interlace::KernelsOf<T> &kernels_;
  std::vector<StraightLayer<T>> layers_;
  std::vector<int64_t> owned_;  // experts of each member
  T *x_ = nullptr;              // [rows, hidden] the residual, in and out
  int64_t *ids_ = nullptr;      // [layers, rows, top_k]
  std::vector<int64_t> asked_;  // rows, ascending; see `all_`
  bool all_ = true;
  int64_t rows_ = 0, hidden_ = 0, width_ = 0, experts_ = 0, top_k_ = 0;

  int64_t at_ = 0, since_ = 0;
  const int64_t *chosen_ = nullptr;  // [rows, top_k] of this layer
  int phase_ = 0;
  bool waits_ = false;
  std::unique_ptr<T, Free> memory_;  // of a block, then `sum_` and `out_`
  T *sum_ = nullptr, *out_ = nullptr;  // [rows, hidden]
  std::vector<float> weights_;
  std::vector<int64_t> chosen_of_asked_, places_, next_, counts_, received_, sent_, arrived_, reads_,
      writes_, totals_, ends_, reads_of_both_, writes_of_both_, totals_of_both_;
  std::vector<const char *> parts_;
};

constexpr char STRAIGHT[] = "interlace.moe.straight";

Straight *straight_of(PyObject *capsule) {
  return static_cast<Straight *>(PyCapsule_GetPointer(capsule, STRAIGHT));
}

METHOD(straight) {
  std::unique_ptr<StraightOf<T>> made(new StraightOf<T>(kernels));
  if (!made->take(next)) return nullptr;
  Straight *straight = made.get();
  PyObject *capsule = PyCapsule_New(straight, STRAIGHT, [](PyObject *own) { delete straight_of(own); });
  if (capsule != nullptr) made.release();
  return capsule;
}

PyObject *outcome_of(Outcome outcome, const Crossing &crossing) {
  if (outcome == NO_MEMORY) return PyErr_NoMemory();
  if (outcome == UNALIGNED) {
    PyErr_SetString(PyExc_ValueError, "the members' windows must lie on pages of their own");
    return nullptr;
  }
  if (outcome != WRONG) return PyLong_FromLong(outcome);
  PyErr_Format(PyExc_ValueError, "a crossing of %lld messages between %lld members is not this pass's",
               static_cast<long long>(crossing.num), static_cast<long long>(crossing.members));
  return nullptr;
}

// The straight pass and the address of its crossing: what came of it.
PyObject *go_on(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
  Arguments next(args, nargs, 2);
  if (!next.good()) return nullptr;
  Straight *straight = straight_of(next.object());
  if (straight == nullptr) return nullptr;
  auto *crossing = next.at<Crossing>();
  if (!next.good()) return nullptr;
  Outcome outcome;
  Py_BEGIN_ALLOW_THREADS;
  outcome = straight->go_on(*crossing);
  Py_END_ALLOW_THREADS;
  return outcome_of(outcome, *crossing);
}

// The same of two passes, each with its crossing.
PyObject *go_on_beside(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
  Arguments next(args, nargs, 4);
  if (!next.good()) return nullptr;
  Straight *straight = straight_of(next.object());
  auto *crossing = straight == nullptr ? nullptr : next.at<Crossing>();
  Straight *other = straight == nullptr ? nullptr : straight_of(next.object());
  if (other == nullptr) return nullptr;
  auto *others = next.at<Crossing>();
  if (!next.good()) return nullptr;
  Outcome outcome;
  Py_BEGIN_ALLOW_THREADS;
  outcome = straight->go_on_beside(*crossing, *other, *others);
  Py_END_ALLOW_THREADS;
  return outcome_of(outcome, *crossing);
}

// Seconds in blocks, dealing, experts and sums.
PyObject *spent(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
  Arguments next(args, nargs, 1);
  if (!next.good()) return nullptr;
  Straight *straight = straight_of(next.object());
  if (straight == nullptr) return nullptr;
  const int64_t *ns = straight->spent;
  return Py_BuildValue("dddd", ns[BLOCK] * 1e-9, ns[DEALING] * 1e-9, ns[EXPERTS] * 1e-9,
                       ns[SUMS] * 1e-9);
}

}  // namespace
