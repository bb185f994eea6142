// Softmax over rows of logits, and sums of gradients: see models/log_probs.py and training/gradients.py, whose torch
// code computes the same.

#include "vectors.h"

#include <limits>

namespace {

constexpr int64_t BLOCK = 256;  // elements that are summed in fp32; over blocks the sum is fp64

struct Sums { double total, weighted; };

// Sums of exp(x * alpha - top) and of that times its exponent.
template <class T, bool WEIGHTED>
Sums sums(const T* x, int64_t count, float alpha, float top) {
    constexpr int W = Lanes<float>::count;
    Sums all{0, 0};
    int64_t i = 0;
    while (i + W <= count) {
        F total{}, weighted{};
        for (const int64_t end = std::min(i + BLOCK, count - count % W); i < end; i += W) {
            F shifted = load(x + i) * alpha - top, e = exp_vector(shifted > 0 ? F{} : shifted);
            total += e;
            if (WEIGHTED) weighted += e * shifted;
        }
        all.total += reduce_sum(total);
        if (WEIGHTED) all.weighted += reduce_sum(weighted);
    }
    for (; i < count; i++) {
        const float shifted = widen(x[i]) * alpha - top, e = std::exp(shifted);
        all.total += e;
        all.weighted += e * shifted;
    }
    return all;
}

template <class T>
void softmax_rows(const T* logits, const int64_t* targets, int64_t rows, int64_t V, float alpha, float* log_probs,
                  float* norms, float* entropies, int threads) {
    constexpr int W = Lanes<float>::count;
#pragma omp parallel for schedule(static) num_threads(team(rows * V, threads))
    for (int64_t r = 0; r < rows; r++) {
        const T* x = logits + r * V;
        const int64_t whole = V - V % W;
        float top = -std::numeric_limits<float>::infinity();
        if (whole) top = reduce_max(largest(x, whole, F{} + top));
        for (int64_t i = whole; i < V; i++) top = std::max(top, widen(x[i]));
        top *= alpha;
        const Sums s = entropies ? sums<T, true>(x, V, alpha, top) : sums<T, false>(x, V, alpha, top);
        const double log_total = std::log(s.total);
        norms[r] = float(top + log_total);
        log_probs[r] = float(double(widen(x[targets[r]]) * alpha - top) - log_total);
        if (entropies) entropies[r] = float(log_total - s.weighted / s.total);
    }
}

// Logits become the gradient of sum(log_prob * to_log_prob + entropy * to_entropy) to them, before the factor alpha.
template <class T>
void softmax_rows_backward(T* logits, const int64_t* targets, int64_t rows, int64_t V, float alpha, const float* norms,
                           const float* entropies, const float* to_log_prob, const float* to_entropy, int threads) {
    constexpr int W = Lanes<float>::count;
#pragma omp parallel for schedule(static) num_threads(team(rows * V, threads))
    for (int64_t r = 0; r < rows; r++) {
        T* x = logits + r * V;
        const float norm = norms[r], a = to_log_prob[r], b = entropies ? to_entropy[r] : 0, h = entropies ? entropies[r] : 0;
        const float at_target = widen(x[targets[r]]) * alpha - norm;
        int64_t i = 0;
        for (; i + W <= V; i += W) {
            F log_p = load(x + i) * alpha - norm;
            log_p = log_p > 0 ? F{} : log_p;
            store(x + i, -exp_vector(log_p) * (a + b * (log_p + h)) * alpha);
        }
        for (; i < V; i++) {
            const float log_p = widen(x[i]) * alpha - norm;
            narrow(-std::exp(log_p) * (a + b * (log_p + h)) * alpha, x + i);
        }
        const float p = std::exp(at_target);
        narrow((a - p * (a + b * (at_target + h))) * alpha, x + targets[r]);
    }
}

// sum += x * scale, or sum = x * scale.
template <class T>
void accumulate(float* sum, const T* x, int64_t count, float scale, int add, int threads) {
    constexpr int W = Lanes<float>::count;
#pragma omp parallel for schedule(static) num_threads(team(count, threads))
    for (int64_t i = 0; i < count; i += W) {
        F v = load(x + i) * scale;
        store(sum + i, add ? load(sum + i) + v : v);
    }
}

}  // namespace

#define ENTRIES(NAME, T)                                                                                              \
    void verl_softmax_rows_##NAME(const T* logits, const int64_t* targets, int64_t rows, int64_t V, float alpha,      \
                                  float* log_probs, float* norms, float* entropies, int threads) {                    \
        softmax_rows(logits, targets, rows, V, alpha, log_probs, norms, entropies, threads);                          \
    }                                                                                                                 \
    void verl_softmax_rows_backward_##NAME(T* logits, const int64_t* targets, int64_t rows, int64_t V, float alpha,   \
                                           const float* norms, const float* entropies, const float* to_log_prob,      \
                                           const float* to_entropy, int threads) {                                    \
        softmax_rows_backward(logits, targets, rows, V, alpha, norms, entropies, to_log_prob, to_entropy, threads);   \
    }

extern "C" {
ENTRIES(bf16, bf16)
ENTRIES(fp32, float)
void verl_accumulate_bf16(float* sum, const bf16* x, int64_t count, float scale, int64_t add, int threads) {
    accumulate(sum, x, count, scale, add, threads);
}
}
