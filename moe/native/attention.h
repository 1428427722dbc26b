// Attention over pages of 64 positions that lie at absolute places.
//
// A key page is a packed weight of 64 outputs, a value page one of 64 inputs, so scores and mixed
// values are products of tiles. A row meets its pages in ascending order and keeps a running
// maximum, total and mix (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867). Which
// rows share a tile decides nothing: each has sums of its own, over its own pages only.

constexpr int64_t TILE_ROWS = 8 * MAX_ROWS;  // query rows that read a page together

// The running softmax of the rows of one tile, (token, head) pairs of one key/value head.
template <class T>
struct Rows {
  const Staged<T> *queries;  // [rows, width]
  float *mixed;           // [rows, width]
  float *highest, *total;
  const int64_t *positions;
};

// A page that is read next, asked for by and by: all at once would keep what is read now waiting.
struct Asking {
  Ahead next;
  int64_t left;  // cache lines
  void operator()() {
    next.lines = lesser(next.lines, left);
    left -= next.lines;
    ask(next);
  }
};
template <class T>
inline Asking asking_for(const T *page, int64_t elements, int64_t times) {
  const auto bytes = page == nullptr ? 0 : elements * static_cast<int64_t>(sizeof(T));
  const int64_t lines = bytes / LINE_BYTES;
  return {ahead(page, (lines + times - 1) / times), lines};
}

// Lets rows [first, first + count) meet one page; `seen[i]` of its positions are for row i.
// Meanwhile page `next` is asked for, unless it is null.
template <class T>
inline void meet(Shaped &shaped, const Rows<T> &rows, int64_t first, int64_t count, const int64_t *seen,
                 const T *keys, const T *next, int64_t width, float scale) {
  alignas(64) float sums[MAX_ROWS * MAX_UNITS * UNIT], scores[MAX_ROWS * BLOCK];
  alignas(64) Staged<T> weights[MAX_ROWS * BLOCK];
  alignas(64) float fading[UNIT];
  const auto asked = [=](int64_t at, int64_t lines) {
    return next == nullptr ? NOTHING : ahead(next + at, lines);
  };
  // Where tiles do not ask, each row does, four times.
  Asking asking = asking_for(ASKS_AHEAD ? nullptr : next, 2 * BLOCK * width, 4 * count);
  const T *values = keys + BLOCK * width;
  const Staged<T> *queries = rows.queries + first * width;
  const int64_t most = seen[count - 1];
  const int64_t needed = (most + PANEL - 1) / PANEL * PANEL / UNIT;
  for (int64_t unit = 0; unit < needed;) {
    const int64_t now = lesser(units_at_once(count), needed - unit);
    sum_alone<T>(shaped, count, now, queries, width, keys + unit * UNIT * width, UNIT * width,
                 width, sums, asked(unit * UNIT * width, now));
    for (int64_t row = 0; row < count; row++) {
      asking();
      for (int64_t at = 0; at < now * UNIT; at += UNIT) {
        store(scores + row * BLOCK + unit * UNIT + at,
              mul(load(sums + row * MAX_UNITS * UNIT + at), all(scale * LOG2_E)));
      }
    }
    unit += now;
  }
  for (int64_t row = 0; row < UNIT; row++) fading[row] = 0.0f;
  for (int64_t row = 0; row < count; row++) {
    asking();
    Vec highest = all(rows.highest[first + row]);
    for (int64_t at = 0; at < seen[row]; at += UNIT) {
      const Vec score = load(scores + row * BLOCK + at);
      highest = larger(highest, first_lanes(score, seen[row] - at, -INFINITY));
    }
    const float now = largest(highest);
    fading[row] = rows.highest[first + row] - now;
    rows.highest[first + row] = now;
  }
  store(fading, exp2_of(load(fading)));
  for (int64_t row = 0; row < count; row++) {
    asking();
    const Vec highest = all(rows.highest[first + row]);
    Vec total = all(0.0f);
    for (int64_t at = 0; at < BLOCK; at += UNIT) {
      Vec weight = all(0.0f);
      if (at < seen[row]) {
        weight = exp2_of(sub(load(scores + row * BLOCK + at), highest));
        weight = first_lanes(weight, seen[row] - at, 0.0f);
      }
      total = add(total, stage(weights + row * BLOCK + at, weight));
    }
    float &kept = rows.total[first + row];
    kept = kept * fading[row] + sum(total);
  }
  const int64_t units = width / UNIT;
  for (int64_t unit = 0; unit < units;) {
    const int64_t now = lesser(units_at_once(count), units - unit);
    sum_alone<T>(shaped, count, now, weights, BLOCK, values + unit * UNIT * BLOCK, UNIT * BLOCK,
                 most, sums, asked(BLOCK * (width + unit * UNIT), now));
    for (int64_t row = 0; row < count; row++) {
      asking();
      float *mixed = rows.mixed + (first + row) * width + unit * UNIT;
      for (int64_t at = 0; at < now * UNIT; at += UNIT) {
        store(mixed + at, fused(load(mixed + at), all(fading[row]),
                                load(sums + row * MAX_UNITS * UNIT + at)));
      }
    }
    unit += now;
  }
}

// The pages of one sequence and one key/value head.
template <class T>
struct Pages {
  const Attention<T> &a;
  const int64_t *table;
  int64_t group;
  const T *at(int64_t block) const {
    return a.pages + (table[block] * a.kv_heads + group) * 2 * BLOCK * a.width;
  }
};

// Lets `count` rows meet their pages. Page `then`, if it is not null, is what is met next.
template <class T>
inline void attend_tile(Shaped &shaped, const Attention<T> &a, const Rows<T> &rows, int64_t count,
                        const Pages<T> &pages, const T *then) {
  const int64_t last = rows.positions[count - 1] / BLOCK;
  int64_t first = 0;
  for (int64_t block = 0; block <= last; block++) {
    if (stands_aside(a.aside)) shaped = {};
    while (rows.positions[first] < block * BLOCK) first++;
    const T *keys = pages.at(block);
    const T *next = block < last ? pages.at(block + 1) : then;
    for (int64_t row = first; row < count; row += MAX_ROWS) {
      const int64_t now = lesser(MAX_ROWS, count - row);
      int64_t seen[MAX_ROWS];
      for (int64_t nth = 0; nth < now; nth++) {
        seen[nth] = lesser(BLOCK, rows.positions[row + nth] - block * BLOCK + 1);
      }
      meet(shaped, rows, row, now, seen, keys, row == first ? next : nullptr, a.width, a.scale);
    }
  }
}

template <class T>
bool attend(const Attention<T> &a) {
  const int64_t members = a.heads / a.kv_heads;
  const int64_t most_tokens = greater(1, TILE_ROWS / members);
  const int64_t most = most_tokens * members;
  Scratch<float> floats(most * (a.width + 2));
  Scratch<T> gathered(most * a.width);
  Scratch<Staged<T>> staged(staged_size<T>(most, a.width));
  Scratch<int64_t> positions(most);
  if (!floats.good() || !gathered.good() || !staged.good() || !positions.good()) return false;
  float *mixed = floats.get(), *highest = mixed + most * a.width, *total = highest + most;
  Shaped shaped;
  const int64_t token_size = a.heads * a.width, group_size = members * a.width;
  for (int64_t sequence = 0; sequence < a.sequences; sequence++) {
    const int64_t end = a.starts[sequence + 1];
    for (int64_t token = a.starts[sequence]; token < end; token += most_tokens) {
      const int64_t tokens = lesser(most_tokens, end - token), count = tokens * members;
      for (int64_t row = 0; row < count; row++) {
        positions.get()[row] = a.positions[token + row / members];
      }
      for (int64_t group = 0; group < a.kv_heads; group++) {
        const int64_t at = token * token_size + group * group_size;
        const int64_t *table = a.tables + sequence * a.tables_stride;
        const T *then = nullptr;
        if (group + 1 < a.kv_heads) {
          then = Pages<T>{a, table, group + 1}.at(0);
        } else if (sequence + 1 < a.sequences) {
          then = Pages<T>{a, table + a.tables_stride, 0}.at(0);
        }
        for (int64_t nth = 0; nth < tokens; nth++) {
          std::memcpy(gathered.get() + nth * group_size, a.queries + at + nth * token_size,
                      static_cast<size_t>(group_size) * sizeof(T));
        }
        const Staged<T> *queries = stage(staged.get(), gathered.get(), a.width, count, a.width);
        for (int64_t nth = 0; nth < count * a.width; nth++) mixed[nth] = 0.0f;
        for (int64_t row = 0; row < count; row++) highest[row] = -INFINITY, total[row] = 0.0f;
        const Rows<T> rows = {queries, mixed, highest, total, positions.get()};
        attend_tile(shaped, a, rows, count, {a, table, group}, then);
        for (int64_t row = 0; row < count; row++) {
          T *out = a.out + at + row / members * token_size + row % members * a.width;
          const Vec share = all(1.0f / total[row]);
          for (int64_t nth = 0; nth < a.width; nth += UNIT) {
            narrow(out + nth, mul(load(mixed + row * a.width + nth), share));
          }
        }
      }
    }
  }
  return true;
}
