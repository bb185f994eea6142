// What stands between the matrix products of a Llama-shaped layer: norms, rotary embeddings and gates, forward and
// backward. They round to bf16 where the torch operations of the model do.

#include "vectors.h"

#include <vector>

namespace {

// x += delta (if there is one), then out = weight * x / rms(x); all [d], d a multiple of the vector length.
template <class T>
void norm_row(T* x, const T* delta, const T* weight, T* out, int64_t d, double eps) {
    constexpr int W = Lanes<float>::count;
    F squares{};
    for (int64_t i = 0; i < d; i += W) {
        F v = load(x + i);
        if (delta) {
            v = rounded<T>(v + load(delta + i));
            store(x + i, v);
        }
        squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(reduce_sum(squares) / float(d) + float(eps));
    for (int64_t i = 0; i < d; i += W) store(out + i, rounded<T>(load(x + i) * scale) * load(weight + i));
}

// Rotate a token's heads in place: x [heads, D], cos and sin [rotary], rotary / 2 a multiple of the vector length.
template <class T>
void rotate_row(T* x, const T* cos, const T* sin, int64_t heads, int64_t D, int64_t rotary) {
    const int64_t half = rotary / 2;
    for (T* head = x; head < x + heads * D; head += D)
        for (int64_t i = 0; i < half; i += Lanes<float>::count) {
            F a = load(head + i), b = load(head + half + i);
            store(head + i, rounded<T>(a * load(cos + i)) - rounded<T>(b * load(sin + i)));
            store(head + half + i, rounded<T>(b * load(cos + half + i)) + rounded<T>(a * load(sin + half + i)));
        }
}

template <class T>
void rms_norm(T* x, const T* delta, const T* weight, T* out, int64_t rows, int64_t d, double eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(team(rows * d, threads))
    for (int64_t r = 0; r < rows * d; r += d) norm_row(x + r, delta ? delta + r : nullptr, weight, out + r, d, eps);
}

// The backward of rms_norm's norm, for the gradient dy of its output: dx += its gradient to x, dweight += that to the
// weight (fp32), and out = the norm's output again. x, dy, dx, out [rows, d].
template <class T>
void rms_norm_backward(const T* x, const T* weight, const T* dy, T* dx, T* out, float* dweight, int64_t rows, int64_t d,
                       double eps, int threads) {
    constexpr int W = Lanes<float>::count;
    const int workers = team(rows * d, threads);
    std::vector<float> partial(workers * d);
#pragma omp parallel num_threads(workers)
    {
        float* own = partial.data() + omp_get_thread_num() * d;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const T *row = x + r * d, *grad = dy + r * d;
            F squares{}, dot{};
            for (int64_t i = 0; i < d; i += W) {
                F v = load(row + i);
                squares += v * v;
                dot += v * load(grad + i) * load(weight + i);
            }
            const float scale = 1.0f / std::sqrt(reduce_sum(squares) / float(d) + float(eps));
            const float mean = reduce_sum(dot) * scale * scale / float(d);
            for (int64_t i = 0; i < d; i += W) {
                F v = load(row + i), g = load(grad + i), w = load(weight + i), normed = rounded<T>(v * scale);
                store(out + r * d + i, normed * w);
                store(own + i, load(own + i) + g * normed);
                store(dx + r * d + i, load(dx + r * d + i) + scale * (g * w - v * mean));
            }
        }
    }
    // In the order of the threads, so that the sum repeats.
    for (int t = 0; t < workers; t++)
        for (int64_t i = 0; i < d; i++) dweight[i] += partial[t * d + i];
}

// x [tokens, heads, D], cos and sin [tokens, rotary].
template <class T>
void rotate(T* x, const T* cos, const T* sin, int64_t tokens, int64_t heads, int64_t D, int64_t rotary, int threads) {
#pragma omp parallel for schedule(static) num_threads(team(tokens * heads * D, threads))
    for (int64_t t = 0; t < tokens; t++)
        rotate_row(x + t * heads * D, cos + t * rotary, sin + t * rotary, heads, D, rotary);
}

// out = silu(gate) * up, count a multiple of the vector length; out may be gate.
template <class T>
void silu_mul(const T* gate, const T* up, T* out, int64_t count, int threads) {
#pragma omp parallel for schedule(static) num_threads(team(count, threads))
    for (int64_t i = 0; i < count; i += Lanes<float>::count) {
        store(out + i, rounded<T>(silu(load(gate + i))) * load(up + i));
    }
}

// For the gradient of silu_mul's output: gradients of gate and up, and the output again in the gradient's place.
template <class T>
void silu_mul_backward(const T* gate, const T* up, T* grad, T* dgate, T* dup, int64_t count, int threads) {
#pragma omp parallel for schedule(static) num_threads(team(count, threads))
    for (int64_t i = 0; i < count; i += Lanes<float>::count) {
        F x = load(gate + i), e = exp_vector(x > 0 ? -x : x), u = load(up + i), g = load(grad + i);
        F sigmoid = (x > 0 ? F{} + 1.0f : e) / (e + 1.0f), silu = rounded<T>(x * sigmoid);
        store(dup + i, g * silu);
        store(dgate + i, rounded<T>(g * u) * sigmoid * (1.0f + x * (1.0f - sigmoid)));
        store(grad + i, silu * u);
    }
}

}  // namespace

#define ENTRIES(NAME, T)                                                                                              \
    void verl_rms_norm_##NAME(T* x, const T* delta, const T* weight, T* out, int64_t rows, int64_t d, double eps,     \
                              int threads) {                                                                          \
        rms_norm(x, delta, weight, out, rows, d, eps, threads);                                                       \
    }                                                                                                                 \
    void verl_rms_norm_backward_##NAME(const T* x, const T* weight, const T* dy, T* dx, T* out, float* dweight,       \
                                       int64_t rows, int64_t d, double eps, int threads) {                            \
        rms_norm_backward(x, weight, dy, dx, out, dweight, rows, d, eps, threads);                                    \
    }                                                                                                                 \
    void verl_rotate_##NAME(T* x, const T* cos, const T* sin, int64_t tokens, int64_t heads, int64_t D,               \
                            int64_t rotary, int threads) {                                                            \
        rotate(x, cos, sin, tokens, heads, D, rotary, threads);                                                       \
    }                                                                                                                 \
    void verl_silu_mul_##NAME(const T* gate, const T* up, T* out, int64_t count, int threads) {                       \
        silu_mul(gate, up, out, count, threads);                                                                      \
    }                                                                                                                 \
    void verl_silu_mul_backward_##NAME(const T* gate, const T* up, T* grad, T* dgate, T* dup, int64_t count,          \
                                       int threads) {                                                                 \
        silu_mul_backward(gate, up, grad, dgate, dup, count, threads);                                                \
    }

extern "C" {
ENTRIES(bf16, bf16)
ENTRIES(fp32, float)
}
