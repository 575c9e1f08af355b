// Rows over a vocabulary: argmax, top-k, sums of exp. Included by level.cpp only.
// Ties are ordered by (value descending, index ascending); NaN counts as -inf.

constexpr int64_t kTopBlock = 64;

inline const float* logits(const VocabularyArgs& a, int64_t row) { return a.x + row * a.stride; }
inline bool is_large(const VocabularyArgs& a) { return a.rows * a.width > kParallelValues; }

inline V load_logits(const float* x, int64_t at, int64_t width) { return row_load(x, false, at, width, -kInfinity); }

inline float top_of(const float* x, int64_t begin, int64_t end) {
    V top = set1(-kInfinity);
    for (int64_t i = begin; i < end; i += 16) top = maximum(load_logits(x, i, end), top);
    return lane_max(top);
}

inline int64_t argmax_row(const float* x, int64_t width) {
    const float top = top_of(x, 0, width);
    int64_t i = 0;
    while (i < width && !(x[i] == top)) ++i;
    return i < width ? i : 0;  // a row of nothing but NaN and -inf
}

void argmax(const VocabularyArgs& a, int64_t* index) {
#pragma omp parallel for num_threads(a.threads) if (is_large(a))
    for (int64_t r = 0; r < a.rows; ++r) index[r] = argmax_row(logits(a, r), a.width);
}

struct Entry {
    float value;
    int64_t index;
};

inline bool before(const Entry& a, const Entry& b) {
    return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// The worst kept entry on top, so that a better one can replace it.
inline void sift_down(Entry* heap, int64_t size, int64_t at) {
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= size) return;
        if (child + 1 < size && before(heap[child], heap[child + 1])) ++child;
        if (!before(heap[at], heap[child])) return;
        const Entry moved = heap[at];
        heap[at] = heap[child];
        heap[child] = moved;
        at = child;
    }
}

// The first entries in tie order, of those offered.
struct Best {
    Entry* heap;
    int64_t room, size = 0;
    void heapify() {
        for (int64_t i = size / 2; i-- > 0;) sift_down(heap, size, i);
    }
    void offer(Entry entry) {
        if (size < room) {
            heap[size++] = entry;
            if (size == room) heapify();
        } else if (before(entry, heap[0])) {
            heap[0] = entry;
            sift_down(heap, size, 0);
        }
    }
    void sort() {
        for (int64_t i = size; i-- > 1;) {
            const Entry worst = heap[0];
            heap[0] = heap[i];
            heap[i] = worst;
            sift_down(heap, i, 0);
        }
    }
};

inline int64_t top_blocks(int64_t width) { return ceil_div(width, kTopBlock); }

inline void block_tops(const float* x, int64_t width, float* tops) {
    for (int64_t b = 0; b < top_blocks(width); ++b)
        tops[b] = top_of(x, b * kTopBlock, smaller((b + 1) * kTopBlock, width));
}

// Leaves the first k = best.room <= width entries of the row in order. The k-th largest block maximum bounds the k-th
// largest value from below, so only blocks that reach it are searched.
inline void first_entries(const float* x, int64_t width, float* tops, Best& best) {
    const int64_t blocks = top_blocks(width);
    float bound = -kInfinity;
    block_tops(x, width, tops);
    if (blocks >= best.room) {
        for (int64_t b = 0; b < blocks; ++b) best.offer({tops[b], b});
        bound = best.heap[0].value;
        best.size = 0;
    }
    for (int64_t b = 0; b < blocks; ++b) {
        if (tops[b] < bound) continue;
        for (int64_t i = b * kTopBlock; i < smaller((b + 1) * kTopBlock, width); ++i) {
            const float value = x[i] == x[i] ? x[i] : -kInfinity;
            if (!(value < bound)) best.offer({value, i});
        }
    }
    best.sort();
}

inline void topk_row(const float* x, int64_t width, int64_t k, float* tops, Best best, float* values, int64_t* index) {
    first_entries(x, width, tops, best);
    for (int64_t i = 0; i < k; ++i) {
        values[i] = best.heap[i].value;
        index[i] = best.heap[i].index;
    }
}

void topk(const VocabularyArgs& a, int64_t k, float* values, int64_t* index) {
#pragma omp parallel num_threads(a.threads) if (is_large(a))
    {
        Scratch tops(top_blocks(a.width)), heap(k * int64_t(sizeof(Entry) / 4));
#pragma omp for
        for (int64_t r = 0; r < a.rows; ++r)
            topk_row(logits(a, r), a.width, k, tops.data, {reinterpret_cast<Entry*>(heap.data), k}, values + r * k,
                     index + r * k);
    }
}

struct Partition {
    float top, total;
};

// Largest value (0 for a row of nothing but -inf) and the sum of exp of the distances to it.
inline Partition partition(const float* x, int64_t width) {
    float top = top_of(x, 0, width);
    if (top == -kInfinity) top = 0.0f;
    V total = zero();
    for (int64_t i = 0; i < width; i += 16) total = add(total, vexp(sub(load_logits(x, i, width), set1(top))));
    return {top, lane_sum(total)};
}

inline float log_total(const Partition& p) { return p.total > 0 ? p.top + slog(p.total) : -kInfinity; }

void logsumexp(const VocabularyArgs& a, float* y) {
#pragma omp parallel for num_threads(a.threads) if (is_large(a))
    for (int64_t r = 0; r < a.rows; ++r) y[r] = log_total(partition(logits(a, r), a.width));
}

inline void softmax_row(const float* x, int64_t width, bool logarithm, float* y) {
    const Partition p = partition(x, width);
    const float sum = p.total > 0 ? p.total : 1.0f;
    const V top = set1(p.top), total = set1(sum), log = set1(slog(sum));
    for (int64_t i = 0; i < width; i += 16) {
        const V distance = sub(load_logits(x, i, width), top);  // before the logarithm: large logits lose nothing
        row_store(y, false, i, width, logarithm ? sub(distance, log) : div(vexp(distance), total));
    }
}

void softmax(const VocabularyArgs& a, float* y, bool logarithm) {
#pragma omp parallel for num_threads(a.threads) if (is_large(a))
    for (int64_t r = 0; r < a.rows; ++r) softmax_row(logits(a, r), a.width, logarithm, y + r * a.width);
}
