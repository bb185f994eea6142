// What is done to one token's numbers between the products of a Llama-shaped layer. It rounds to bf16 where the torch
// operations of the model do, so that rollout and training agree with it.

#pragma once

#include "vectors.h"

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

}  // namespace
