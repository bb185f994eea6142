// The choice of the next token: see rollout/sampler.py, whose torch code gives the same result.

#include "vectors.h"

#include <limits>
#include <vector>

namespace {

constexpr int64_t VOCABULARY_BLOCK = 256;

struct Rows {
    const void* logits;
    const double *uniforms, *inverse_temperature;  // [rows]; 0: greedy
    const int64_t* top_k;
    const double *top_p, *min_p;
    int64_t* tokens;
    double* log_probs;
    int64_t rows, vocabulary, row_stride;
    int threads;
};

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
    // A vector of logits; what lies behind the last one weighs nothing.
    const auto at = [&](int64_t i) {
        if (i + W <= count) return load(logits + i);
        V x = V{} - std::numeric_limits<A>::infinity();
        for (int64_t j = 0; i + j < count; j++) x[j] = widen(logits[i + j]);
        return x;
    };
    const int64_t rest = count % W;
    const A peak = reduce_max(largest(logits, count - rest, at(count - rest)));
    const bool greedy = rows.inverse_temperature[r] == 0;
    int64_t top = 0;
    while (greedy && top + W < count && reduce_max(at(top)) != peak) top += W;
    while (greedy && top < count - 1 && widen(logits[top]) != peak) top++;
    const A inverse = greedy ? A(1) : A(rows.inverse_temperature[r]);
    for (int64_t b = 0; b < blocks; b++) {
        V total{};
        for (int64_t i = b * VOCABULARY_BLOCK; i < (b + 1) * VOCABULARY_BLOCK; i += W) {
            const V weight = exp_vector((at(i) - peak) * inverse);
            store(&weights[i], weight);
            total += weight;
        }
        sums[b] = reduce_sum(total);
    }
    const double full = sum(sums.data(), blocks);
    if (greedy) {
        rows.tokens[r] = top;
        rows.log_probs[r] = std::log(double(weights[top])) - std::log(full);
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

#define ENTRIES(NAME, T)                                                                                              \
    void verl_sample_##NAME(const T* logits, const double* uniforms, const double* inverse_temperature,               \
                            const int64_t* top_k, const double* top_p, const double* min_p, int64_t* tokens,          \
                            double* log_probs, int64_t rows, int64_t vocabulary, int64_t stride, int threads) {       \
        choose<T>({logits, uniforms, inverse_temperature, top_k, top_p, min_p, tokens, log_probs, rows, vocabulary,   \
                   stride, threads});                                                                                 \
    }

extern "C" {
ENTRIES(bf16, bf16)
ENTRIES(fp32, float)
ENTRIES(fp64, double)
}
