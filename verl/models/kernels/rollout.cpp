// What generation on the CPU spends its time on besides matrix products and layers.cpp: attention over the paged KV
// cache, and the choice of the next token. Each has a torch counterpart that gives the same result: attention.py and
// sampler.py of the rollout.

#include "vectors.h"

#include <limits>
#include <vector>

namespace {

constexpr int BLOCK = 32;
constexpr int CHUNK = 8 * BLOCK;  // keys between two rescalings of the online softmax

// Turn scores [count] into exp(score - peak), in place; returns their sum. count is a multiple of BLOCK.
inline float exponentials(float* s, int count, float peak) {
    F total{};
    for (int j = 0; j < count; j += Lanes<float>::count) {
        F p = exp_vector(load(s + j) - peak);
        store(s + j, p);
        total += p;
    }
    return reduce_sum(total);
}
inline double exponentials(double* s, int count, double peak) {
    double sum = 0;
    for (int j = 0; j < count; j++) sum += s[j] = std::exp(s[j] - peak);
    return sum;
}

// Attention of one step. A tile is a run of tokens that see the same prompt blocks: samples of one prompt, or
// neighbours in a prompt being read. All query heads of a tile that share a key/value head are multiplied with each
// block at once, so the prompt is read once per tile; then each token goes on, alone, over its own blocks. Softmax
// is online. A token's result does not depend on the others of its tile, bit for bit.
//
// Layout of one layer: keys [N, K, D, BLOCK], values [N, K, BLOCK, D].

// scores[r][0:BLOCK] = q[r] . keys, for R rows.
template <int R, class T, class A>
void score_rows(const A* q, const T* keys, int D, A* scores, int ld) {
    using V = typename Lanes<A>::type;
    constexpr int W = Lanes<A>::count, N = BLOCK / W;
    V sum[R][N] = {};
    for (int d = 0; d < D; d++) {
        V k[N];
        for (int i = 0; i < N; i++) k[i] = load(keys + d * BLOCK + i * W);
        for (int r = 0; r < R; r++)
            for (int i = 0; i < N; i++) sum[r][i] += q[r * D + d] * k[i];
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) store(scores + r * ld + i * W, sum[r][i]);
}

// out[r] += sum over j < count of p[r][j] values[j], for R rows.
template <int R, class T, class A>
void weigh_rows(const A* p, int ld, const T* values, int count, int D, A* out) {
    using V = typename Lanes<A>::type;
    constexpr int W = Lanes<A>::count;
    int d = 0;
    for (; d + 2 * W <= D; d += 2 * W) {
        V sum[R][2];
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) sum[r][i] = load(out + r * D + d + i * W);
        for (int j = 0; j < count; j++) {
            V v0 = load(values + j * D + d), v1 = load(values + j * D + d + W);
            for (int r = 0; r < R; r++) {
                sum[r][0] += p[r * ld + j] * v0;
                sum[r][1] += p[r * ld + j] * v1;
            }
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) store(out + r * D + d + i * W, sum[r][i]);
    }
    for (; d < D; d++)
        for (int r = 0; r < R; r++)
            for (int j = 0; j < count; j++) out[r * D + d] += p[r * ld + j] * widen(values[j * D + d]);
}

template <class T, class A>
void score(int rows, const A* q, const T* keys, int D, A* scores, int ld) {
    for (; rows >= 6; rows -= 6, q += 6 * D, scores += 6 * ld) score_rows<6>(q, keys, D, scores, ld);
    switch (rows) {
        case 5: return score_rows<5>(q, keys, D, scores, ld);
        case 4: return score_rows<4>(q, keys, D, scores, ld);
        case 3: return score_rows<3>(q, keys, D, scores, ld);
        case 2: return score_rows<2>(q, keys, D, scores, ld);
        case 1: return score_rows<1>(q, keys, D, scores, ld);
    }
}

template <class T, class A>
void weigh(int rows, const A* p, int ld, const T* values, int count, int D, A* out) {
    for (; rows >= 6; rows -= 6, p += 6 * ld, out += 6 * D) weigh_rows<6>(p, ld, values, count, D, out);
    switch (rows) {
        case 5: return weigh_rows<5>(p, ld, values, count, D, out);
        case 4: return weigh_rows<4>(p, ld, values, count, D, out);
        case 3: return weigh_rows<3>(p, ld, values, count, D, out);
        case 2: return weigh_rows<2>(p, ld, values, count, D, out);
        case 1: return weigh_rows<1>(p, ld, values, count, D, out);
    }
}

// Ask for memory ahead of its use: a block is too short for the processor to see where the reading goes.
inline void prefetch(const void* start, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(start) + i, 0, 3);
}

template <class A> struct Workspace {
    std::vector<A> q, scores, out, peak, total;
    std::vector<int> low, high;
    void fit(int rows, int tokens, int D) {
        q.resize(size_t(rows) * D);
        out.assign(size_t(rows) * D, A(0));
        scores.resize(size_t(rows) * CHUNK);
        peak.assign(rows, -std::numeric_limits<A>::infinity());
        total.assign(rows, A(0));
        low.resize(tokens);
        high.resize(tokens);
    }
};

// Go on with the softmax of rows [first, first + tokens * group) over the keys of `blocks`; key j of the list is
// visible to a token of the tile when low <= j < high.
template <class T, class A>
void accumulate(Workspace<A>& w, int first_token, int tokens, int group, const int32_t* blocks, const T* keys,
                const T* values, size_t block_stride, int D) {
    int begin = std::numeric_limits<int>::max(), end = 0;
    for (int t = first_token; t < first_token + tokens; t++) {
        if (w.low[t] >= w.high[t]) continue;
        begin = std::min(begin, w.low[t]);
        end = std::max(end, w.high[t]);
    }
    const int rows = tokens * group, row = first_token * group;
    A* const q = w.q.data() + size_t(row) * D;
    A* const out = w.out.data() + size_t(row) * D;
    A* const scores = w.scores.data();
    // Chunks begin at multiples of CHUNK, so that a row's sums do not depend on the rows beside it.
    for (int chunk = begin / CHUNK * CHUNK; chunk < end; chunk += CHUNK) {
        const int start = std::max(chunk, begin / BLOCK * BLOCK);
        const int stop = std::min(chunk + CHUNK, (end + BLOCK - 1) / BLOCK * BLOCK), count = stop - start;
        for (int j = start; j < stop; j += BLOCK)
            prefetch(values + blocks[j / BLOCK] * block_stride, std::min(BLOCK, end - j) * D * sizeof(T));
        for (int j = start; j < stop; j += BLOCK)
            score(rows, q, keys + blocks[j / BLOCK] * block_stride, D, scores + (j - start), CHUNK);
        for (int r = 0; r < rows; r++) {
            A* s = scores + r * CHUNK;
            const int t = first_token + r / group;
            const int low = std::clamp(w.low[t] - start, 0, count), high = std::clamp(w.high[t] - start, 0, count);
            if (low >= high) {
                std::fill(s, s + count, A(0));
                continue;
            }
            std::fill(s, s + low, -std::numeric_limits<A>::infinity());
            std::fill(s + high, s + count, -std::numeric_limits<A>::infinity());
            using V = typename Lanes<A>::type;
            const A peak = reduce_max(largest(s, count, V{} + w.peak[row + r]));
            const A keep = std::exp(w.peak[row + r] - peak);
            w.peak[row + r] = peak;
            w.total[row + r] = w.total[row + r] * keep + exponentials(s, count, peak);
            if (keep != A(1))
                for (int d = 0; d < D; d++) out[size_t(r) * D + d] *= keep;
        }
        for (int j = start; j < stop; j += BLOCK)
            weigh(rows, scores + (j - start), CHUNK, values + blocks[j / BLOCK] * block_stride,
                  std::min(BLOCK, end - j), D, out);
    }
}

}  // namespace

extern "C" {

// What one step asks of every layer; see `Plan` in attention.py.
struct Plan {
    int32_t tokens, tiles;
    const int32_t *positions, *prefix, *slots, *own_begin;          // [tokens]
    const int32_t *tile_start, *shared_begin;                       // [tiles + 1], [tiles]
    const int32_t* blocks;
};
struct Call {
    const void *query, *key, *value;
    void *out, *keys, *values;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // strides in elements
    int32_t heads, kv_heads, head_dim, window, threads;             // window 0: none
    double scale;
};
}

namespace {

template <class T>
void write_token(const Plan& plan, const Call& c, int t) {
    const int D = c.head_dim, block = plan.slots[t] / BLOCK, place = plan.slots[t] % BLOCK;
    for (int h = 0; h < c.kv_heads; h++) {
        const size_t base = (size_t(block) * c.kv_heads + h) * D * BLOCK;
        const T* k = static_cast<const T*>(c.key) + t * c.key_token + h * c.key_head;
        const T* v = static_cast<const T*>(c.value) + t * c.value_token + h * c.value_head;
        T* key = static_cast<T*>(c.keys) + base + place;
        for (int d = 0; d < D; d++) key[d * BLOCK] = k[d];
        std::memcpy(static_cast<T*>(c.values) + base + size_t(place) * D, v, D * sizeof(T));
    }
}

template <class T>
void attend_tile(const Plan& plan, const Call& c, int tile, int h) {
    using A = typename Accumulate<T>::type;
    static thread_local Workspace<A> w;
    const int D = c.head_dim, group = c.heads / c.kv_heads;
    const int first = plan.tile_start[tile], tokens = plan.tile_start[tile + 1] - first;
    const size_t stride = size_t(c.kv_heads) * D * BLOCK;
    const T* keys = static_cast<const T*>(c.keys) + size_t(h) * D * BLOCK;
    const T* values = static_cast<const T*>(c.values) + size_t(h) * D * BLOCK;
    w.fit(tokens * group, tokens, D);
    for (int t = 0; t < tokens; t++) {
        const int position = plan.positions[first + t];
        w.low[t] = c.window ? std::max(0, position + 1 - c.window) : 0;
        w.high[t] = std::min(plan.prefix[first + t], position + 1);
        for (int g = 0; g < group; g++) {
            const T* q = static_cast<const T*>(c.query) + (first + t) * c.query_token + (h * group + g) * c.query_head;
            for (int d = 0; d < D; d++) w.q[size_t(t * group + g) * D + d] = widen(q[d]) * A(c.scale);
        }
    }
    accumulate(w, 0, tokens, group, plan.blocks + plan.shared_begin[tile], keys, values, stride, D);
    for (int t = 0; t < tokens; t++) {
        if (plan.own_begin[first + t] < 0) continue;
        if (t + 1 < tokens && plan.own_begin[first + t + 1] >= 0)
            for (int j = 0; j <= plan.positions[first + t + 1] - plan.prefix[first + t + 1] && j < CHUNK; j += BLOCK)
                prefetch(keys + plan.blocks[plan.own_begin[first + t + 1] + j / BLOCK] * stride, D * BLOCK * sizeof(T));
        const int prefix = plan.prefix[first + t];
        w.low[t] = std::max(0, w.low[t] - prefix);
        w.high[t] = plan.positions[first + t] + 1 - prefix;
        accumulate(w, t, 1, group, plan.blocks + plan.own_begin[first + t], keys, values, stride, D);
    }
    for (int t = 0; t < tokens; t++)
        for (int g = 0; g < group; g++) {
            const int r = t * group + g;
            T* out = static_cast<T*>(c.out) + (size_t(first + t) * c.heads + h * group + g) * D;
            const A inverse = A(1) / w.total[r];
            for (int d = 0; d < D; d++) narrow(w.out[size_t(r) * D + d] * inverse, out + d);
        }
}

template <class T>
void attend(const Plan& plan, const Call& c) {
#pragma omp parallel num_threads(c.threads)
    {
#pragma omp for schedule(static)
        for (int t = 0; t < plan.tokens; t++) write_token<T>(plan, c, t);
#pragma omp for schedule(dynamic, 1)
        for (int unit = 0; unit < plan.tiles * c.kv_heads; unit++)
            attend_tile<T>(plan, c, unit / c.kv_heads, unit % c.kv_heads);
    }
}

// The choice of tokens: see sampler.py, whose blocks these are.

constexpr int64_t VOCABULARY_BLOCK = 256;

}  // namespace

extern "C" {
struct Rows {
    const void* logits;
    const double *uniforms, *inverse_temperature;  // [rows]; 0: greedy
    const int64_t* top_k;
    const double *top_p, *min_p;
    int64_t* tokens;
    double* log_probs;
    int64_t rows, vocabulary, row_stride, threads;
};
}

namespace {

// The index of the first value whose cumulative sum exceeds fraction * total; fraction becomes how far into it.
template <class A>
int64_t first_above(const A* values, int64_t count, double total, double* fraction) {
    const double target = std::min(*fraction * total, std::nextafter(total, 0.0));
    double before = 0;
    int64_t i = 0;
    for (; i < count - 1 && !(before + double(values[i]) > target); i++) before += double(values[i]);
    *fraction = std::clamp((target - before) / double(values[i]), 0.0, 1.0);
    return i;
}
template <class A> double sum(const A* values, int64_t count) {
    double total = 0;
    for (int64_t i = 0; i < count; i++) total += double(values[i]);
    return total;
}

// The smallest weight that top-k, then top-p, then min-p keep.
template <class A>
A smallest_kept(const A* weights, int64_t count, int64_t top_k, double top_p, double min_p, std::vector<A>& sorted) {
    A smallest = 0;
    if (top_k > 0 && top_k < count) {
        sorted.assign(weights, weights + count);
        std::nth_element(sorted.begin(), sorted.begin() + (top_k - 1), sorted.end(), std::greater<A>());
        smallest = sorted[top_k - 1];
    }
    if (top_p < 1) {
        double total = 0, mass = 0;
        for (int64_t i = 0; i < count; i++) total += weights[i] >= smallest ? double(weights[i]) : 0.0;
        // Sort only as many of the largest as are sure to hold the nucleus.
        for (A bound = A(0.015625); mass < top_p * total; bound = bound < A(1e-20) ? A(0) : bound / A(32)) {
            sorted.clear();
            const A least = std::max(bound, smallest);
            mass = 0;
            for (int64_t i = 0; i < count; i++)
                if (weights[i] >= least) sorted.push_back(weights[i]), mass += double(weights[i]);
            if (least == smallest || !(bound > A(0))) break;
        }
        std::sort(sorted.begin(), sorted.end(), std::greater<A>());
        double before = 0;
        for (A weight : sorted) {
            if (!(before < top_p * total)) break;
            smallest = weight;
            before += double(weight);
        }
    }
    return std::max(smallest, A(min_p));
}

template <class T>
void choose_row(const Rows& rows, int64_t r) {
    using A = typename Accumulate<T>::type;
    using V = typename Lanes<A>::type;
    static thread_local std::vector<A> weights, sums, sorted;
    const T* logits = static_cast<const T*>(rows.logits) + r * rows.row_stride;
    const int64_t count = rows.vocabulary;
    const int64_t blocks = (count + VOCABULARY_BLOCK - 1) / VOCABULARY_BLOCK, padded = blocks * VOCABULARY_BLOCK;
    weights.resize(padded);
    sums.resize(blocks);
    constexpr int W = Lanes<A>::count;
    int64_t i = 0;
    for (; i + W <= count; i += W) store(&weights[i], load(logits + i));
    for (; i < padded; i++) weights[i] = i < count ? A(widen(logits[i])) : -std::numeric_limits<A>::infinity();

    const A peak = reduce_max(largest(weights.data(), padded, V{} - std::numeric_limits<A>::infinity()));
    const bool greedy = rows.inverse_temperature[r] == 0;
    const int64_t top = greedy ? std::find(weights.begin(), weights.end(), peak) - weights.begin() : 0;
    const A inverse = greedy ? A(1) : A(rows.inverse_temperature[r]);
    for (int64_t b = 0; b < blocks; b++) {
        A* block = &weights[b * VOCABULARY_BLOCK];
        for (int64_t j = 0; j < VOCABULARY_BLOCK; j += W) store(block + j, V((load(block + j) - peak) * inverse));
        sums[b] = exponentials(block, VOCABULARY_BLOCK, A(0));
    }
    const double full = sum(sums.data(), blocks);
    if (greedy) {
        rows.tokens[r] = std::min(top, count - 1);
        rows.log_probs[r] = std::log(double(weights[rows.tokens[r]])) - std::log(full);
        return;
    }
    double total = full, fraction = rows.uniforms[r];
    const A smallest = smallest_kept(weights.data(), count, rows.top_k[r], rows.top_p[r], rows.min_p[r], sorted);
    if (smallest > A(0)) {
        for (A& weight : weights) weight = weight >= smallest ? weight : A(0);
        for (int64_t b = 0; b < blocks; b++) sums[b] = A(sum(&weights[b * VOCABULARY_BLOCK], VOCABULARY_BLOCK));
        total = sum(sums.data(), blocks);
    }
    const int64_t block = first_above(sums.data(), blocks, total, &fraction);
    const A* inside = &weights[block * VOCABULARY_BLOCK];
    const int64_t offset = first_above(inside, VOCABULARY_BLOCK, sum(inside, VOCABULARY_BLOCK), &fraction);
    const int64_t token = std::min(block * VOCABULARY_BLOCK + offset, count - 1);
    rows.tokens[r] = token;
    rows.log_probs[r] = std::log(double(weights[token])) - std::log(full);
}

template <class T>
void choose(const Rows& rows) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(rows.threads))
    for (int64_t r = 0; r < rows.rows; r++) choose_row<T>(rows, r);
}

}  // namespace

#define ENTRIES(NAME, T)                                                                                       \
    void verl_attend_##NAME(const Plan* plan, const Call* call) { attend<T>(*plan, *call); }                   \
    void verl_choose_##NAME(const Rows* rows) { choose<T>(*rows); }

extern "C" {
ENTRIES(bf16, bf16)
ENTRIES(fp32, float)
ENTRIES(fp64, double)
}
