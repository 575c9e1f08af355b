// The choice of a row by its own temperature, top-k, top-p and min-p, as sampling/distribution.py defines it. Included by
// level.cpp only.
//
// Each cut keeps a prefix of the ids in tie order (vocabulary.h), so they are put in order only as far as the shortest
// prefix may reach: the first k, or those within some distance of the best. Weights are exp in double of the distances
// between scores; only the mass of a whole row, which top-p needs where there is no top-k, is a sum over fp32 lanes.

constexpr double kReaches[] = {5.0, 10.0, 20.0, __builtin_inf()};  // distances to try, in nats
constexpr int64_t kMassBlock = 256;  // sums of so few values lose nothing that counts in fp32

struct CutRow : Contest {
    int64_t top_k;
    double top_p, min_p;

    bool ranks() const { return top_k > 0 && top_k < width; }
    bool is_cut() const { return ranks() || top_p < 1 || min_p > 0; }
    double score(const Entry& entry) const { return double(entry.value) / temperature; }
    double weight(const Best& ordered, int64_t i) const { return exp(score(ordered.heap[i]) - score(ordered.heap[0])); }
};

inline CutRow row_of(const ChoiceArgs& a, int64_t r) {
    return {{logits(a.rows, r), a.rows.width, a.temperature[r], a.key[r]}, a.top_k[r], a.top_p[r], a.min_p[r]};
}

// Sum of exp((logit - top) / temperature), always in the same order.
inline double row_mass(const CutRow& row, float top) {
    const V best = set1(top), temperature = set1(float(row.temperature));
    double total = 0;
    for (int64_t begin = 0; begin < row.width; begin += kMassBlock) {
        const int64_t end = smaller(begin + kMassBlock, row.width);
        V sum = zero();
        for (int64_t i = begin; i < end; i += 16)
            sum = add(sum, vexp(div(sub(load_logits(row.x, i, end), best), temperature)));
        total += double(lane_sum(sum));
    }
    return total;
}

// How many of the entries, which are in order, top-p (the mass `goal`) and min-p keep; -1 if none of the two ends there.
inline int64_t kept(const CutRow& row, const Best& entries, double goal) {
    double mass = 0;
    for (int64_t i = 0; i < entries.size; ++i) {
        const double weight = row.weight(entries, i);
        if (weight < row.min_p) return i;
        mass += weight;
        if (mass >= goal) return i + 1;
    }
    return -1;
}

// Leaves the support in order, with top-k. Masked ids may be among the first k: they weigh nothing and never win.
inline void cut_by_rank(const CutRow& row, float* tops, Best& entries) {
    entries.room = row.top_k;
    first_entries(row.x, row.width, tops, entries);
    double total = 0;
    for (int64_t i = 0; i < entries.size; ++i) total += row.weight(entries, i);
    const int64_t keep = kept(row, entries, row.top_p < 1 ? row.top_p * total : __builtin_inf());
    if (keep >= 0) entries.size = keep;
}

// The ids with logits from `floor` up, in order.
inline void entries_from(const CutRow& row, const float* tops, float floor, Best& entries) {
    entries.size = 0;
    for (int64_t b = 0; b < top_blocks(row.width); ++b) {
        if (!(tops[b] >= floor)) continue;
        for (int64_t i = b * kTopBlock; i < smaller((b + 1) * kTopBlock, row.width); ++i)
            if (row.x[i] >= floor) entries.heap[entries.size++] = {row.x[i], i};
    }
    entries.heapify();
    entries.sort();
}

// Leaves the support in order, without top-k. Nothing that min-p keeps lies below its own reach.
inline void cut_by_mass(const CutRow& row, float* tops, Best& entries) {
    block_tops(row.x, row.width, tops);
    const float top = top_of(tops, 0, top_blocks(row.width));
    const double goal = row.top_p < 1 ? row.top_p * row_mass(row, top) : __builtin_inf();
    const double farthest = 1e-6 - log(row.min_p) * (1 + 1e-6);  // the logarithm and the quotients are rounded
    for (double reach : kReaches) {
        const bool last = reach >= farthest || !(row.top_p < 1);
        entries_from(row, tops, floor_below(top, (last ? farthest : reach) * row.temperature), entries);
        const int64_t keep = kept(row, entries, goal);
        if (keep >= 0) entries.size = keep;
        if (keep >= 0 || last) return;
    }
}

// The entry with the largest score + noise. Scores descend, so after the first few only large bits can win.
inline int64_t noisy_best(const CutRow& row, const Best& entries) {
    Winner winner;
    for (int64_t begin = 0; begin < entries.size; begin += kDraws) {
        const uint64_t least = begin > 0 ? bits_to_beat(winner, row.score(entries.heap[begin])) : 0;
        for (int64_t i = begin; i < smaller(begin + kDraws, entries.size); ++i) {
            const int64_t id = entries.heap[i].index;
            const uint64_t bits = draw_bits(row.key, id);
            if (bits >= least) row.offer(winner, id, bits);
        }
    }
    return winner.id;
}

inline int64_t cut_choice(const CutRow& row, float* tops, Best entries) {
    row.ranks() ? cut_by_rank(row, tops, entries) : cut_by_mass(row, tops, entries);
    return noisy_best(row, entries);
}

// index[r] = the choice of row r, whose best logit is finite; temperature 0 is the argmax. A row without a cut is shared
// among the threads, since all its ids get noise; the others are shared out row by row.
void choose(const ChoiceArgs& a, int64_t* index) {
    const VocabularyArgs& rows = a.rows;
    const int64_t threads = larger(rows.threads, 1);
    Scratch found(threads * int64_t(sizeof(Winner) / 4));
    int64_t others = 0;
    for (int64_t r = 0; r < rows.rows; ++r) {
        const CutRow row = row_of(a, r);
        if (row.is_cut() || !(row.temperature > 0))
            ++others;
        else
            index[r] = noisy_argmax(row, reinterpret_cast<Winner*>(found.data), threads);
    }
    if (others == 0) return;
#pragma omp parallel num_threads(smaller(threads, others)) if (others * rows.width > kParallelValues)
    {
        Scratch tops(top_blocks(rows.width)), entries(rows.width * int64_t(sizeof(Entry) / 4));
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 0; r < rows.rows; ++r) {
            const CutRow row = row_of(a, r);
            if (!(row.temperature > 0))
                index[r] = argmax_row(row.x, row.width);
            else if (row.is_cut())
                index[r] = cut_choice(row, tops.data, {reinterpret_cast<Entry*>(entries.data), rows.width});
        }
    }
}
