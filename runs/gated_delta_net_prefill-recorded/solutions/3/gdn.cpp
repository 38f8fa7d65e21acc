// Each task: one sequence x one value head; the two cores take tasks from a list, longest first.
// The kept state is the true one divided by the decay G since the last rescaling, so a token costs three FMAs an
// element: the update, the dot with its query and the dot with the next token's key, in one pass over the state.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#include <immintrin.h>
#include <omp.h>
constexpr int D = 128;
typedef __m256 F;
static inline F hsum8(F a0, F a1, F a2, F a3, F b0, F b1, F b2, F b3) {  // lanes 0-3: sums of a, 4-7: of b
    F x = _mm256_hadd_ps(_mm256_hadd_ps(a0, a1), _mm256_hadd_ps(a2, a3));
    F y = _mm256_hadd_ps(_mm256_hadd_ps(b0, b1), _mm256_hadd_ps(b2, b3));
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}
// dst = c src + u k^T over 4 rows; returns {dst kn (4), dst q (4)}
template <bool MUL>
static inline F pass(float* __restrict dst, const float* src, const float* k, const float* kn, const float* q,
                     __m128 u, float c) {
    F u0 = _mm256_broadcastss_ps(u), u1 = _mm256_broadcastss_ps(_mm_permute_ps(u, 0x55));
    F u2 = _mm256_broadcastss_ps(_mm_permute_ps(u, 0xaa)), u3 = _mm256_broadcastss_ps(_mm_permute_ps(u, 0xff));
    F z = _mm256_setzero_ps(), a0 = z, a1 = z, a2 = z, a3 = z, b0 = z, b1 = z, b2 = z, b3 = z;
    F cc = _mm256_set1_ps(c);
    for (int j = 0; j < D; j += 8) {
        F kv = _mm256_loadu_ps(k + j), nv = _mm256_loadu_ps(kn + j), qv = _mm256_loadu_ps(q + j), s;
#define ROW(r) \
        s = _mm256_loadu_ps(src + r * D + j); \
        if (MUL) s = _mm256_mul_ps(s, cc); \
        s = _mm256_fmadd_ps(u##r, kv, s); \
        _mm256_storeu_ps(dst + r * D + j, s); \
        a##r = _mm256_fmadd_ps(s, nv, a##r); \
        b##r = _mm256_fmadd_ps(s, qv, b##r);
        ROW(0) ROW(1) ROW(2) ROW(3)
    }
    return hsum8(a0, a1, a2, a3, b0, b1, b2, b3);
}
struct Step { float c, G, inv, beta; bool mul; };
extern "C" void gdn(const float* q, const float* k, const float* v, const float* state, const float* A_log,
                    const float* a, const float* dt_bias, const float* b, const int64_t* cu, float* out, float* ns,
                    float scale, int N, int T, int Hk, int Hv) {
    int R = Hv / Hk;
    std::vector<int> order(N);
    for (int i = 0; i < N; i++) order[i] = i;
    std::sort(order.begin(), order.end(), [&](int x, int y) { return cu[x + 1] - cu[x] > cu[y + 1] - cu[y]; });
    #pragma omp parallel for schedule(dynamic, 1)
    for (int task = 0; task < N * Hv; task++) {
        int n = order[task / Hv], h = task % Hv;
        const float* S0 = state + ((size_t)n * Hv + h) * D * D;
        float* S = ns + ((size_t)n * Hv + h) * D * D;
        float A = std::exp(A_log[h]);
        int L = cu[n + 1] - cu[n];
        static thread_local std::vector<Step> steps;
        steps.resize(L);
        float G = 1;
        for (int i = 0; i < L; i++) {
            int64_t t = cu[n] + i;
            float x = a[t * Hv + h] + dt_bias[h];
            float sp = x > 20 ? x : std::log1p(std::exp(x));
            G *= std::exp(-A * sp);
            Step& s = steps[i];
            s.beta = 1.f / (1.f + std::exp(-b[t * Hv + h]));
            s.c = G;  // true state before the update = c * kept state
            s.mul = G < 1e-3f || i == L - 1;
            if (s.mul) G = 1;
            s.G = G; s.inv = 1 / G;
        }
        constexpr int RB = 32;  // 32 rows of the state: 16 KiB, stays in L1 over all tokens
        alignas(64) static thread_local float buf[RB * D];
        const float* k0 = k + (cu[n] * Hk + h / R) * D;
        const float* q0 = q + (cu[n] * Hk + h / R) * D;
        const float* v0 = v + (cu[n] * Hv + h) * D;
        float* o0 = out + (cu[n] * Hv + h) * D;
        size_t kst = (size_t)Hk * D, vst = (size_t)Hv * D;
        for (int r0 = 0; r0 < D; r0 += RB) {
            __m128 ks[RB / 4];
            for (int r = 0; r < RB; r += 4)
                ks[r / 4] = _mm256_castps256_ps128(pass<false>(buf + r * D, S0 + (r0 + r) * D, k0, k0, q0, _mm_setzero_ps(), 1));
            for (int i = 0; i < L; i++) {
                const Step& s = steps[i];
                const float *kk = k0 + i * kst, *kn = k0 + std::min(i + 1, L - 1) * kst, *qq = q0 + i * kst;
                bool last = i == L - 1;
                __m128 f = _mm_set1_ps(s.beta * s.inv), c = _mm_set1_ps(s.c), os = _mm_set1_ps(scale * s.G);
                float* dst = last ? S + r0 * D : buf;
                for (int r = 0; r < RB; r += 4) {
                    __m128 u = _mm_mul_ps(f, _mm_fnmadd_ps(c, ks[r / 4], _mm_loadu_ps(v0 + i * vst + r0 + r)));
                    F res = s.mul ? pass<true>(dst + r * D, buf + r * D, kk, kn, qq, u, s.c)
                                  : pass<false>(dst + r * D, buf + r * D, kk, kn, qq, u, 1);
                    ks[r / 4] = _mm256_castps256_ps128(res);
                    _mm_storeu_ps(o0 + i * vst + r0 + r, _mm_mul_ps(os, _mm256_extractf128_ps(res, 1)));
                }
            }
        }
    }
}
