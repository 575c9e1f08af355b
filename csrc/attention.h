// Tree attention over paged keys in logical order. Included by level.cpp only.
//
// What is computed for one query (a row and a head), whatever stands beside it: keys low .. count - 1 in blocks of
// kKeyBlock anchored at logical key 0; a score is one fused chain over the head size; online softmax (Milakov and
// Gimelshein, arXiv 1805.02867) updates the largest score once a block; the sum of weights lives in 16 lanes, key j in
// lane j mod 16; each output is one fused chain over the visible keys in order. Blocks with no visible key are left
// out. Masked keys take no part: not even their NaNs do.
//
// How it is shared: keys and values of a run of rows are unpacked to fp32 once per panel of 16 keys, and a tile of
// up to six queries walks over them. A panel that holds keys of a row's own tail is unpacked for that row alone.

constexpr int kKeyBlock = 64;
constexpr int kBlockPanels = kKeyBlock / kPanelKeys;
constexpr int64_t kMinTaskRows = 4, kMaxTaskRows = 32;

// State of one query between blocks.
struct Query {
    int64_t low, count;  // visible logical keys
    float top;
};

struct Task {
    const AttentionArgs& a;
    const Run& run;
    int64_t group, begin, end;  // kv head; rows
    int64_t per_group;          // query heads per kv head
    int64_t padded;             // head size in whole lanes
    float *q, *mixed, *totals, *scores;
    const void* zeros;  // a row for keys nobody sees
    Query* queries;
    Panel shared[kBlockPanels], own[kBlockPanels];
    int64_t query_count() const { return (end - begin) * per_group; }
};

inline int64_t slot_of(const Task& t, int64_t row, int64_t key) {
    const AttentionArgs& a = t.a;
    if (key < a.shared[row]) return t.run.slots[key];
    return a.tail[row * a.tail_width + key - a.prefix[row]];
}

// Unpack keys low .. high - 1 of the panel that starts at logical key `start`, as `row` sees them.
inline void unpack(const Task& t, int64_t row, int64_t start, int64_t low, int64_t high, const Panel& panel) {
    const AttentionArgs& a = t.a;
    const void *keys[kPanelKeys], *values[kPanelKeys];
    for (int64_t j = start; j < start + kPanelKeys; ++j) {
        keys[j - start] = values[j - start] = t.zeros;
        if (j < low || j >= high) continue;
        const int64_t at = (t.group * a.held + slot_of(t, row, j)) * a.head_dim;
        keys[j - start] = row_at(const_cast<void*>(a.keys), a.kv_bf16, at);
        values[j - start] = row_at(const_cast<void*>(a.values), a.kv_bf16, at);
    }
    unpack_keys(keys, a.kv_bf16, a.head_dim, panel.keys);
    unpack_values(values, a.kv_bf16, a.head_dim, t.padded, panel.values);
}

template <int R>
inline void score_panel(const float* q, int64_t head_dim, const float* keys, float* scores) {
    V acc[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] = zero();
    for (int64_t d = 0; d < head_dim; ++d) {
        const V k = load(keys + d * kPanelKeys);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r] = fma(set1(q[r * head_dim + d]), k, acc[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(scores + r * kKeyBlock, acc[r]);
}

// mixed[r][d] = chain over keys low .. high - 1 of the block of weights[r][j] * values[j][d].
template <int R, int ND>
inline void mix(const float* weights, const Panel* panels, int64_t low, int64_t high, int64_t d, int64_t padded,
                float* mixed) {
    V acc[R][ND];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < ND; ++n) acc[r][n] = load(mixed + r * padded + d + 16 * n);
    for (int64_t p = low / kPanelKeys; p * kPanelKeys < high; ++p) {
        const int64_t begin = larger(low, p * kPanelKeys), end = smaller(high, (p + 1) * kPanelKeys);
        const float* values = panels[p].values + d - p * kPanelKeys * padded;
        for (int64_t j = begin; j < end; ++j) {
            V value[ND];
#pragma GCC unroll 4
            for (int n = 0; n < ND; ++n) value[n] = load(values + j * padded + 16 * n);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const V weight = set1(weights[r * kKeyBlock + j]);
#pragma GCC unroll 4
                for (int n = 0; n < ND; ++n) acc[r][n] = fma(weight, value[n], acc[r][n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < ND; ++n) store(mixed + r * padded + d + 16 * n, acc[r][n]);
}

template <int R>
inline void mix_all(const float* weights, const Panel* panels, int64_t low, int64_t high, int64_t padded,
                    float* mixed) {
    constexpr int ND = panels_for(R);
    int64_t d = 0;
    for (; d + 16 * ND <= padded; d += 16 * ND) mix<R, ND>(weights, panels, low, high, d, padded, mixed);
    for (; d < padded; d += 16) mix<R, 1>(weights, panels, low, high, d, padded, mixed);
}

// Asks for keys and values of the next panel while this one is unpacked: they lie scattered over the pages.
inline void fetch(const Task& t, int64_t row, int64_t start, int64_t low, int64_t high) {
    const AttentionArgs& a = t.a;
    const int64_t bytes = a.head_dim * (a.kv_bf16 ? 2 : 4);
    for (int64_t j = larger(low, start); j < smaller(high, start + kPanelKeys); ++j) {
        const int64_t at = (t.group * a.held + slot_of(t, row, j)) * bytes;
        for (int64_t line = 0; line < bytes; line += 64) {
            prefetch(static_cast<const char*>(a.keys) + at + line);
            prefetch(static_cast<const char*>(a.values) + at + line);
        }
    }
}

// Turns the scores of one query into weights and rescales its state. Keys low .. high - 1 of the block are visible.
inline void weigh(const Task& t, int64_t query, int64_t low, int64_t high, float* scores) {
    Query& state = t.queries[query];
    V block[kBlockPanels], top = set1(-kInfinity);
    for (int p = 0; p < kBlockPanels; ++p) {
        block[p] = set1(-kInfinity);
        if (p * kPanelKeys >= high || (p + 1) * kPanelKeys <= low) continue;
        V s = mul(load(scores + p * kPanelKeys), set1(t.a.scale));
        if (t.a.softcap > 0) s = capped(s, t.a.softcap);
        if (p * kPanelKeys < low || (p + 1) * kPanelKeys > high) {
            const V key = add(lane_numbers(), set1(float(p * kPanelKeys)));
            s = where_less(key, set1(float(low)), set1(-kInfinity), s);
            s = where_less(key, set1(float(high)), s, set1(-kInfinity));
        }
        block[p] = s;
        top = maximum(s, top);
    }
    V total = load(t.totals + query * 16);
    const float highest = lane_max(top);
    if (highest > state.top) {  // otherwise the factor is exactly 1
        const V shrink = vexp(sub(set1(state.top), set1(highest)));
        total = mul(total, shrink);
        for (int64_t d = 0; d < t.padded; d += 16) {
            float* mixed = t.mixed + query * t.padded + d;
            store(mixed, mul(load(mixed), shrink));
        }
        state.top = highest;
    }
    const V safe = set1(state.top == -kInfinity ? 0.0f : state.top);
    for (int p = 0; p < kBlockPanels; ++p) {
        const V weight = vexp(sub(block[p], safe));
        store(scores + p * kPanelKeys, weight);
        total = add(total, weight);
    }
    store(t.totals + query * 16, total);
}

// Visible keys of a query inside the block at `start`; empty as (0, 0).
inline void visible(const Query& q, int64_t start, int64_t& low, int64_t& high) {
    low = larger(q.low - start, 0);
    high = smaller(q.count - start, kKeyBlock);
    if (low >= high) low = high = 0;
}

// R neighbouring queries over one block.
template <int R>
void walk(const Task& t, int64_t query, int64_t start, const Panel* panels) {
    int64_t low[R], high[R], first = kKeyBlock, last = 0, common_low = 0, common_high = kKeyBlock;
    for (int r = 0; r < R; ++r) {
        visible(t.queries[query + r], start, low[r], high[r]);
        common_low = larger(common_low, low[r]);
        common_high = smaller(common_high, high[r]);
        if (low[r] == high[r]) continue;
        first = smaller(first, low[r]);
        last = larger(last, high[r]);
    }
    if (first >= last) return;
    for (int64_t p = first / kPanelKeys; p * kPanelKeys < last; ++p)
        score_panel<R>(t.q + query * t.a.head_dim, t.a.head_dim, panels[p].keys, t.scores + p * kPanelKeys);
    for (int r = 0; r < R; ++r)
        if (low[r] < high[r]) weigh(t, query + r, low[r], high[r], t.scores + r * kKeyBlock);
    const bool together = common_low < common_high;
    float* mixed = t.mixed + query * t.padded;
    for (int r = 0; r < R; ++r) {
        const int64_t stop = together ? common_low : high[r];
        if (low[r] < stop) mix_all<1>(t.scores + r * kKeyBlock, panels, low[r], stop, t.padded, mixed + r * t.padded);
    }
    if (!together) return;
    mix_all<R>(t.scores, panels, common_low, common_high, t.padded, mixed);
    for (int r = 0; r < R; ++r)
        if (common_high < high[r])
            mix_all<1>(t.scores + r * kKeyBlock, panels, common_high, high[r], t.padded, mixed + r * t.padded);
}

// Queries `begin` .. `end` - 1 over one block, in tiles.
inline void walk_all(const Task& t, int64_t begin, int64_t end, int64_t start, const Panel* panels) {
    using Walk = void (*)(const Task&, int64_t, int64_t, const Panel*);
    static constexpr Walk walks[kTileRows] = {walk<1>, walk<2>, walk<3>, walk<4>, walk<5>, walk<6>};
    const int64_t tiles = ceil_div(end - begin, kTileRows);
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t low = begin + (end - begin) * i / tiles, high = begin + (end - begin) * (i + 1) / tiles;
        walks[high - low - 1](t, low, start, panels);
    }
}

// Does this row find every key it sees in the block through the run's slots?
inline bool is_shared(const Task& t, int64_t row, int64_t start) {
    return t.a.shared[row] >= smaller(t.a.count[row], start + kKeyBlock);
}

inline void unpack_shared(Task& t, int64_t start) {
    int64_t low = INT64_MAX, high = 0, reader = t.begin;
    for (int64_t row = t.begin; row < t.end; ++row) {
        low = smaller(low, t.queries[(row - t.begin) * t.per_group].low);
        if (t.a.shared[row] > high) high = t.a.shared[row], reader = row;
    }
    for (int p = 0; p < kBlockPanels; ++p) {
        const int64_t at = start + p * kPanelKeys;
        fetch(t, reader, at + kPanelKeys, low, high);
        if (at < high && at + kPanelKeys > low) unpack(t, reader, at, low, high, t.shared[p]);
    }
}

// A row some of whose keys in the block are its own: borrow the panels that are shared, unpack the others.
inline void walk_own(const Task& t, int64_t row, int64_t start) {
    const int64_t query = (row - t.begin) * t.per_group;
    const Query& q = t.queries[query];
    Panel panels[kBlockPanels];
    for (int p = 0; p < kBlockPanels; ++p) {
        const int64_t at = start + p * kPanelKeys;
        const bool borrowed = t.a.shared[row] >= smaller(q.count, at + kPanelKeys);
        panels[p] = borrowed ? t.shared[p] : t.own[p];
        if (!borrowed && q.low < at + kPanelKeys) unpack(t, row, at, q.low, q.count, t.own[p]);
    }
    walk_all(t, query, query + t.per_group, start, panels);
}

inline void walk_block(Task& t, int64_t start) {
    unpack_shared(t, start);
    for (int64_t row = t.begin; row < t.end;) {
        int64_t stop = row;
        while (stop < t.end && is_shared(t, stop, start)) ++stop;
        if (stop > row) walk_all(t, (row - t.begin) * t.per_group, (stop - t.begin) * t.per_group, start, t.shared);
        if (stop < t.end) walk_own(t, stop++, start);
        row = stop;
    }
}

inline void load_queries(Task& t) {
    const AttentionArgs& a = t.a;
    for (int64_t i = 0; i < t.query_count(); ++i) {
        const int64_t row = t.begin + i / t.per_group, head = t.group * t.per_group + i % t.per_group;
        const void* q = row_at(const_cast<void*>(a.q), a.bf16, (row * a.heads + head) * a.head_dim);
        for (int64_t d = 0; d < a.head_dim; d += 16)
            row_store(t.q + i * a.head_dim, false, d, a.head_dim, row_load(q, a.bf16, d, a.head_dim));
        int64_t low = a.first[row];
        if (a.window > 0) low = larger(low, a.count[row] - a.window);
        t.queries[i] = {low, a.count[row], -kInfinity};
        store(t.totals + i * 16, zero());
        for (int64_t d = 0; d < t.padded; d += 16) store(t.mixed + i * t.padded + d, zero());
    }
}

inline void store_results(const Task& t) {
    const AttentionArgs& a = t.a;
    for (int64_t i = 0; i < t.query_count(); ++i) {
        const int64_t row = t.begin + i / t.per_group, head = t.group * t.per_group + i % t.per_group;
        void* y = row_at(a.y, a.bf16, (row * a.heads + head) * a.head_dim);
        const float total = lane_sum(load(t.totals + i * 16));
        for (int64_t d = 0; d < t.padded; d += 16) {
            const V mixed = load(t.mixed + i * t.padded + d);
            row_store(y, a.bf16, d, a.head_dim, total > 0 ? div(mixed, set1(total)) : mixed);
        }
    }
}

inline void attend(const AttentionArgs& a, const Run& run, int64_t group, int64_t begin, int64_t end) {
    const int64_t per_group = a.heads / a.groups, padded = ceil_div(a.head_dim, 16) * 16;
    const int64_t queries = (end - begin) * per_group, panel = kPanelKeys * padded;
    const int64_t width = ceil_div(a.head_dim, 16) * 16;
    const int64_t per_query = width + padded + 16 + int64_t(sizeof(Query) / 4);
    Scratch scratch(queries * per_query + kTileRows * kKeyBlock + 4 * kBlockPanels * panel + padded);
    float* at = scratch.data;
    auto take = [&](int64_t floats) { return at += floats, at - floats; };
    Task t{a, run, group, begin, end, per_group, padded, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, {}, {}};
    for (int p = 0; p < kBlockPanels; ++p) {
        t.shared[p].keys = take(panel);
        t.shared[p].values = take(panel);
        t.own[p].keys = take(panel);
        t.own[p].values = take(panel);
    }
    float* zeros = take(padded);
    for (int64_t d = 0; d < padded; d += 16) store(zeros + d, zero());
    t.zeros = zeros;
    t.scores = take(kTileRows * kKeyBlock);
    t.totals = take(queries * 16);
    t.mixed = take(queries * padded);
    t.queries = reinterpret_cast<Query*>(take(queries * int64_t(sizeof(Query) / 4)));
    t.q = take(queries * width);
    load_queries(t);
    int64_t low = INT64_MAX, high = 0;
    for (int64_t i = 0; i < queries; ++i) {
        low = smaller(low, t.queries[i].low);
        high = larger(high, t.queries[i].count);
    }
    for (int64_t start = larger(low, 0) / kKeyBlock * kKeyBlock; start < high; start += kKeyBlock) walk_block(t, start);
    store_results(t);
}

// By the threads that call it together, which all return when every row is done.
inline void attention_in_team(const AttentionArgs& a) {
    // Two tasks per thread: more would unpack the same keys too often.
    const int64_t wanted = ceil_div(a.rows, ceil_div(2 * a.threads, a.groups));
    const int64_t step = smaller(larger(wanted, kMinTaskRows), kMaxTaskRows);
    int64_t tasks = 0;
    for (int64_t r = 0; r < a.run_count; ++r) tasks += ceil_div(a.runs[r].end - a.runs[r].begin, step);
    Scratch list((tasks + 1) * 6);
    int64_t* blocks = reinterpret_cast<int64_t*>(list.data);  // run, begin, end
    for (int64_t r = 0, i = 0; r < a.run_count; ++r)
        for (int64_t row = a.runs[r].begin; row < a.runs[r].end; row += step, ++i) {
            blocks[3 * i] = r;
            blocks[3 * i + 1] = row;
            blocks[3 * i + 2] = smaller(row + step, a.runs[r].end);
        }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks * a.groups; ++i) {
        const int64_t* block = blocks + 3 * (i / a.groups);
        attend(a, a.runs[block[0]], i % a.groups, block[1], block[2]);
    }
}

void attention(const AttentionArgs& a) {
#pragma omp parallel num_threads(a.threads)
    attention_in_team(a);
}
