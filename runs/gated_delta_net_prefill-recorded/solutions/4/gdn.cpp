// Chunked form, state kept as given ([value][key]). Task: one sequence x one key head (with its R value heads).
// A chunk has C = 4 NV tokens; its keys and queries are packed transposed, KQ[128][2C], so that a few rows of the state
// meet 2C columns in registers. The triangular system is inverted; u (scaled to the chunk's end) and the
// outputs then come from one small product, and the state rows are updated at once.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#include <immintrin.h>
#include <omp.h>
constexpr int D = 128, CM = 16;
typedef __m256 F;
static inline F ld(const float* p) { return _mm256_loadu_ps(p); }
static inline void st(float* p, F x) { _mm256_storeu_ps(p, x); }
static inline F bc(const float* p) { return _mm256_broadcast_ss(p); }
struct Work {
    alignas(64) float S[2][D * D];
    alignas(64) float KQ[D * 2 * CM], K[CM * D], VT[D * 2 * CM], RES[D * 2 * CM], KK[CM * 2 * CM], MP[CM * 2 * CM], coef[2 * CM];
};
template <int NV, int RB>
static inline void dots(const float* s, const float* kq, F (&acc)[RB][NV]) {
    for (int r = 0; r < RB; r++) for (int j = 0; j < NV; j++) acc[r][j] = _mm256_setzero_ps();
    for (int i = 0; i < D; i++) {
        F b[NV];
        for (int j = 0; j < NV; j++) b[j] = ld(kq + i * 8 * NV + 8 * j);
        for (int r = 0; r < RB; r++) {
            F x = bc(s + r * D + i);
            for (int j = 0; j < NV; j++) acc[r][j] = _mm256_fmadd_ps(x, b[j], acc[r][j]);
        }
    }
}
template <int NV, bool LAST>
static void rows(const float* src, float* dst, Work& w, float gend, F (&mask)[NV]) {
    constexpr int C = 4 * NV, W = 8 * NV, RB = NV == 1 ? 8 : NV == 4 ? 2 : 4;
    F ge = _mm256_set1_ps(gend);
    for (int r0 = 0; r0 < D; r0 += 8) {
        for (int r1 = r0; r1 < r0 + 8; r1 += RB) {
            F acc[RB][NV];
            dots<NV, RB>(src + r1 * D, w.KQ, acc);
            for (int r = 0; r < RB; r++) for (int j = 0; j < NV; j++) {
                F x = _mm256_fmadd_ps(acc[r][j], ld(w.coef + 8 * j), ld(w.VT + (r1 + r) * W + 8 * j));
                st(w.RES + (r1 + r) * W + 8 * j, x);
                acc[r][j] = _mm256_and_ps(x, mask[j]);
            }
            for (int s = 0; s < C; s++) {
                F b[NV];
                for (int j = 0; j < NV; j++) b[j] = ld(w.MP + s * W + 8 * j);
                for (int r = 0; r < RB; r++) {
                    F x = bc(w.RES + (r1 + r) * W + s);
                    for (int j = 0; j < NV; j++) acc[r][j] = _mm256_fmadd_ps(x, b[j], acc[r][j]);
                }
            }
            for (int r = 0; r < RB; r++) for (int j = 0; j < NV; j++) st(w.RES + (r1 + r) * W + 8 * j, acc[r][j]);
        }
        for (int r1 = r0; r1 < r0 + 8; r1 += 4)
            for (int j = 0; j < D; j += 16) {
                F acc[4][2];
                for (int r = 0; r < 4; r++) for (int x = 0; x < 2; x++) acc[r][x] = _mm256_mul_ps(ge, ld(src + (r1 + r) * D + j + 8 * x));
                for (int t = 0; t < C; t++) {
                    F b0 = ld(w.K + t * D + j), b1 = ld(w.K + t * D + j + 8);
                    for (int r = 0; r < 4; r++) {
                        F u = bc(w.RES + (r1 + r) * W + t);
                        acc[r][0] = _mm256_fmadd_ps(u, b0, acc[r][0]);
                        acc[r][1] = _mm256_fmadd_ps(u, b1, acc[r][1]);
                    }
                }
                for (int r = 0; r < 4; r++) for (int x = 0; x < 2; x++) {
                    float* p = dst + (r1 + r) * D + j + 8 * x;
                    if (LAST) _mm256_stream_ps(p, acc[r][x]); else st(p, acc[r][x]);
                }
            }
    }
}
struct Args { const float *q, *k, *v, *a, *b, *dt, *Aexp; float* out; float scale; int Hk, Hv, R; };
template <int NV>
static void chunk(const Args& A, Work& w, int64_t t0, int m, int kh, const float* const* src, float* const* dst, bool last) {
    constexpr int C = 4 * NV, W = 8 * NV;
    for (int t = 0; t < C; t++)
        if (t < m) {
            const float* kk = A.k + ((t0 + t) * A.Hk + kh) * D; const float* qq = A.q + ((t0 + t) * A.Hk + kh) * D;
            memcpy(w.K + t * D, kk, 4 * D);
            for (int i = 0; i < D; i++) { w.KQ[i * W + t] = kk[i]; w.KQ[i * W + C + t] = qq[i]; }
        } else {
            memset(w.K + t * D, 0, 4 * D);
            for (int i = 0; i < D; i++) w.KQ[i * W + t] = w.KQ[i * W + C + t] = 0;
        }
    for (int s = 0; s < C; s += 2) {
        F acc[2][NV]; dots<NV, 2>(w.K + s * D, w.KQ, acc);
        for (int r = 0; r < 2; r++) for (int j = 0; j < NV; j++) st(w.KK + (s + r) * W + 8 * j, acc[r][j]);
    }
    alignas(32) int mk[W];
    for (int j = 0; j < W; j++) mk[j] = j >= C ? -1 : 0;
    F mask[NV];
    for (int j = 0; j < NV; j++) mask[j] = ld((float*)mk + 8 * j);
    for (int hr = 0; hr < A.R; hr++) {
        int h = kh * A.R + hr;
        float g[C], beta[C], cum[C], end[C];
        for (int t = 0; t < C; t++) {
            g[t] = 1; beta[t] = 0;
            if (t < m) {
                float x = A.a[(t0 + t) * A.Hv + h] + A.dt[h];
                float sp = x > 20 ? x : std::log1p(std::exp(x));
                g[t] = std::exp(-A.Aexp[h] * sp);
                beta[t] = 1.f / (1.f + std::exp(-A.b[(t0 + t) * A.Hv + h]));
            }
            cum[t] = t ? cum[t - 1] * g[t] : g[t];
        }
        end[C - 1] = 1;
        for (int t = C - 2; t >= 0; t--) end[t] = end[t + 1] * g[t + 1];
        alignas(32) float M[C][C], P[C][C];
        for (int t = 0; t < C; t++) {
            w.coef[t] = -cum[t]; w.coef[C + t] = A.scale * cum[t];
            float m_[C] = {}, p[C] = {};
            float ratio = 1;
            m_[t] = 1;
            for (int s = t - 1; s >= 0; s--) {
                ratio *= g[s + 1];
                float x = ratio * w.KK[s * W + t], y = ratio * w.KK[s * W + C + t];
                for (int i = 0; i < C; i++) { m_[i] -= x * M[s][i]; p[i] += y * M[s][i]; }
            }
            float y = w.KK[t * W + C + t];
            for (int i = 0; i < C; i++) { M[t][i] = beta[t] * m_[i]; P[t][i] = A.scale * (p[i] + y * M[t][i]); }
        }
        for (int t = 0; t < C; t++) for (int s = 0; s < C; s++) { w.MP[s * W + t] = end[t] * M[t][s]; w.MP[s * W + C + t] = P[t][s]; }
        for (int t = 0; t < C; t++) {
            if (t < m) { const float* vv = A.v + ((t0 + t) * A.Hv + h) * D; for (int i = 0; i < D; i++) w.VT[i * W + t] = vv[i]; }
            else for (int i = 0; i < D; i++) w.VT[i * W + t] = 0;
            for (int i = 0; i < D; i++) w.VT[i * W + C + t] = 0;
        }
        if (last) rows<NV, true>(src[hr], dst[hr], w, cum[C - 1], mask);
        else rows<NV, false>(src[hr], dst[hr], w, cum[C - 1], mask);
        for (int t = 0; t < m; t++) {
            float* oo = A.out + ((t0 + t) * A.Hv + h) * D;
            for (int i = 0; i < D; i++) oo[i] = w.RES[i * W + C + t];
        }
    }
}
extern "C" void gdn(const float* q, const float* k, const float* v, const float* state, const float* A_log,
                    const float* a, const float* dt_bias, const float* b, const int64_t* cu, float* out, float* ns,
                    float scale, int N, int T, int Hk, int Hv) {
    int R = Hv / Hk;
    std::vector<int> order(N);
    for (int i = 0; i < N; i++) order[i] = i;
    std::sort(order.begin(), order.end(), [&](int x, int y) { return cu[x + 1] - cu[x] > cu[y + 1] - cu[y]; });
    std::vector<float> Aexp(Hv);
    for (int h = 0; h < Hv; h++) Aexp[h] = std::exp(A_log[h]);
    Args A{q, k, v, a, b, dt_bias, Aexp.data(), out, scale, Hk, Hv, R};
    #pragma omp parallel for schedule(dynamic, 1)
    for (int task = 0; task < N * Hk; task++) {
        static thread_local Work* wp = nullptr;
        if (!wp) wp = new Work;
        Work& w = *wp;
        int n = order[task / Hk], kh = task % Hk;
        // at most two value heads at a time
        int L = cu[n + 1] - cu[n];
        int nch = (L + CM - 1) / CM, per = (L + nch - 1) / nch;
        per = (per + 3) / 4 * 4;
        for (int t = 0; t < L; t += per) {
            int m = std::min(per, L - t);
            bool last = t + m == L;
            const float* src[64]; float* dst[64];
            for (int r = 0; r < R; r++) {
                size_t off = ((size_t)n * Hv + kh * R + r) * D * D;
                float* mid = r < 2 ? w.S[r] : ns + off;
                src[r] = t ? mid : state + off;
                dst[r] = last ? ns + off : mid;
            }
            switch ((m + 3) / 4) {
                case 1: chunk<1>(A, w, cu[n] + t, m, kh, src, dst, last); break;
                case 2: chunk<2>(A, w, cu[n] + t, m, kh, src, dst, last); break;
                case 3: chunk<3>(A, w, cu[n] + t, m, kh, src, dst, last); break;
                default: chunk<4>(A, w, cu[n] + t, m, kh, src, dst, last);
            }
        }
        _mm_sfence();
    }
}
