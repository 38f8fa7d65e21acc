// Chunked form, state kept as given ([value][key]). Task: one sequence x one key head (with its R value heads).
// A chunk has C = 4 NV tokens; its keys and queries are packed transposed, KQ[128][2C], so that a few rows of the state
// meet 2C columns in registers. The triangular system is inverted; u (scaled to the chunk's end) and the
// outputs then come from one small product, and the state rows are updated at once.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstdlib>
#include <vector>
#include <immintrin.h>
#include <omp.h>
#ifndef PF
#define PF 1
#endif
#ifndef ROWS
#define ROWS 8
#endif
#ifndef PFH
#define PFH _MM_HINT_T0
#endif
#ifndef CMAX
#define CMAX 8
#endif
constexpr int D = 128, CM = 16, CUSE = CMAX;  // buffers hold 16 tokens; chunks have up to CUSE
typedef __m256 F;
#define UNR _Pragma("GCC unroll 16")
static inline F ld(const float* p) { return _mm256_loadu_ps(p); }
static inline void st(float* p, F x) { _mm256_storeu_ps(p, x); }
#define REG(x) asm volatile("" : "+x"(x))  // keeps a loaded operand in a register: no load is repeated in every FMA
static inline F bc(const float* p) { return _mm256_broadcast_ss(p); }
struct Work {
    alignas(64) float S[2][D * D];
    alignas(64) float KQ[D * 2 * CM], K[CM * D], VT[D * 2 * CM], RES[D * 2 * CM], KK[CM * 2 * CM], MP[CM * 2 * CM], coef[2 * CM], dummy[D];
};
static inline void tr8(const F (&a)[8], F (&o)[8]) {
    F b[8], c[8];
    UNR for (int i = 0; i < 4; i++) { b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]); b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]); }
    UNR for (int i = 0; i < 8; i += 4) {
        c[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44); c[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        c[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44); c[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    UNR for (int i = 0; i < 4; i++) { o[i] = _mm256_permute2f128_ps(c[i], c[i + 4], 0x20); o[i + 4] = _mm256_permute2f128_ps(c[i], c[i + 4], 0x31); }
}
static inline F vexp(F x) {  // Cephes expf; below -87 it is 0
    F under = _mm256_cmp_ps(x, _mm256_set1_ps(-87.f), _CMP_LT_OQ);
    x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.f)), _mm256_set1_ps(88.f));
    F n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), 8);
    F r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    F p = _mm256_set1_ps(1.9875691500e-4f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.f)));
    __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(under, _mm256_mul_ps(p, _mm256_castsi256_ps(e)));
}
static inline F vlog1p01(F y) {  // log(1 + y), 0 <= y <= 1
    F one = _mm256_set1_ps(1.f), w = _mm256_add_ps(one, y), d = _mm256_sub_ps(w, one);
    F big = _mm256_cmp_ps(w, _mm256_set1_ps(1.41421356f), _CMP_GT_OQ);  // log w = log(w / 2) + log 2
    F x = _mm256_sub_ps(_mm256_blendv_ps(w, _mm256_mul_ps(w, _mm256_set1_ps(.5f)), big), one), z = _mm256_mul_ps(x, x);
    F p = _mm256_set1_ps(7.0376836292e-2f);
    const float c[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    UNR for (int i = 0; i < 8; i++) p = _mm256_fmadd_ps(p, x, _mm256_set1_ps(c[i]));
    F l = _mm256_fmadd_ps(_mm256_mul_ps(p, x), z, _mm256_fmadd_ps(z, _mm256_set1_ps(-.5f), x));
    l = _mm256_add_ps(l, _mm256_and_ps(big, _mm256_set1_ps(0.69314718f)));
    F tiny = _mm256_cmp_ps(d, _mm256_setzero_ps(), _CMP_EQ_OQ);
    F c1 = _mm256_div_ps(y, _mm256_blendv_ps(d, one, tiny));  // corrects for the rounding of 1 + y
    return _mm256_blendv_ps(_mm256_mul_ps(l, c1), y, tiny);
}
static void gates(const float* a, const float* b, const float* dt, const float* A, float* g, float* beta) {
    F x = _mm256_add_ps(ld(a), ld(dt)), sign = _mm256_set1_ps(-0.f), one = _mm256_set1_ps(1.f);
    F sp = _mm256_add_ps(_mm256_max_ps(x, _mm256_setzero_ps()), vlog1p01(vexp(_mm256_or_ps(x, sign))));
    st(g, vexp(_mm256_xor_ps(sign, _mm256_mul_ps(ld(A), sp))));
    st(beta, _mm256_div_ps(one, _mm256_add_ps(one, vexp(_mm256_xor_ps(sign, ld(b))))));
}
alignas(64) static const float ZERO[D] = {};
// dst[i * W + col] = rows[col][i]
static void pack(float* dst, int W, int end, const float* const* rows) {
    for (int c = 0; c < end; c += 8)
        for (int i = 0; i < D; i += 8) {
            F a[8], o[8];
            UNR for (int x = 0; x < 8; x++) a[x] = ld(rows[c + x] + i);
            tr8(a, o);
            UNR for (int x = 0; x < 8; x++) st(dst + (i + x) * W + c, o[x]);
        }
}
static void unpack(const float* src, int W, int c0, float* const* rows) {
    for (int c = c0; c < W; c += 8)
        for (int i = 0; i < D; i += 8) {
            F a[8], o[8];
            UNR for (int x = 0; x < 8; x++) a[x] = ld(src + (i + x) * W + c);
            tr8(a, o);
            UNR for (int x = 0; x < 8; x++) st(rows[c + x] + i, o[x]);
        }
}
template <int NV, int RB>
static inline void dots(const float* s, const float* kq, F (&acc)[RB][NV]) {
    UNR for (int r = 0; r < RB; r++) UNR for (int j = 0; j < NV; j++) acc[r][j] = _mm256_setzero_ps();
    _Pragma("GCC unroll 2") for (int i = 0; i < D; i++) {
        F b[NV];
        UNR for (int j = 0; j < NV; j++) { b[j] = ld(kq + i * 8 * NV + 8 * j); REG(b[j]); }
        UNR for (int r = 0; r < RB; r++) {
            F x = bc(s + r * D + i);
            UNR for (int j = 0; j < NV; j++) acc[r][j] = _mm256_fmadd_ps(x, b[j], acc[r][j]);
        }
    }
}
template <int NV, bool LAST, bool FIRST>
static __attribute__((noinline)) void rows(const float* src, float* dst, Work& w, float gend, F (&mask)[NV]) {
    constexpr int C = 4 * NV, W = 8 * NV, RB = NV == 1 ? 8 : NV == 4 ? 2 : 4;
    F ge = _mm256_set1_ps(gend);
    // Three passes over GR rows, so that no pass waits for what the last one has just stored.
    constexpr int GR = ROWS;
    for (int r0 = 0; r0 < D; r0 += GR) {
        for (int r1 = r0; r1 < r0 + GR; r1 += RB) {
            F acc[RB][NV];
            dots<NV, RB>(src + r1 * D, w.KQ, acc);
            UNR for (int r = 0; r < RB; r++) UNR for (int j = 0; j < NV; j++) {
                F x = 8 * j < C ? _mm256_fmadd_ps(acc[r][j], ld(w.coef + 8 * j), ld(w.VT + (r1 + r) * W + 8 * j)) : _mm256_mul_ps(acc[r][j], ld(w.coef + 8 * j));
                st(w.RES + (r1 + r) * W + 8 * j, x);
            }
        }
        for (int r1 = r0; r1 < r0 + GR; r1 += RB) {
            F acc[RB][NV];
            UNR for (int r = 0; r < RB; r++) UNR for (int j = 0; j < NV; j++)
                acc[r][j] = 8 * j + 8 <= C ? _mm256_setzero_ps() : 8 * j >= C ? ld(w.RES + (r1 + r) * W + 8 * j) : _mm256_and_ps(ld(w.RES + (r1 + r) * W + 8 * j), mask[j]);
            UNR for (int s = 0; s < C; s++) {
                F b[NV];
                UNR for (int j = 0; j < NV; j++) if (8 * j + 8 > s || 8 * j + 8 > C) { b[j] = ld(w.MP + s * W + 8 * j); REG(b[j]); }
                UNR for (int r = 0; r < RB; r++) {
                    F x = bc(w.RES + (r1 + r) * W + s);
                    UNR for (int j = 0; j < NV; j++) if (8 * j + 8 > s || 8 * j + 8 > C) acc[r][j] = _mm256_fmadd_ps(x, b[j], acc[r][j]);
                }
            }
            UNR for (int r = 0; r < RB; r++) UNR for (int j = 0; j < NV; j++) st(w.RES + (r1 + r) * W + 8 * j, acc[r][j]);
        }
        for (int r1 = r0; r1 < r0 + GR; r1 += 4)
            for (int j = 0; j < D; j += 16) {
                const char* pf = (const char*)(src + (r1 + GR) * D) + j / 16 * 256;  // the next GR rows
                if (FIRST) UNR for (int x = 0; x < 4; x++) _mm_prefetch(pf + 64 * x, PFH);
                F acc[4][2];
                UNR for (int r = 0; r < 4; r++) UNR for (int x = 0; x < 2; x++) acc[r][x] = _mm256_mul_ps(ge, ld(src + (r1 + r) * D + j + 8 * x));
                UNR for (int t = 0; t < C; t++) {
                    F b0 = ld(w.K + t * D + j), b1 = ld(w.K + t * D + j + 8); REG(b0); REG(b1);
                    UNR for (int r = 0; r < 4; r++) {
                        F u = bc(w.RES + (r1 + r) * W + t);
                        acc[r][0] = _mm256_fmadd_ps(u, b0, acc[r][0]);
                        acc[r][1] = _mm256_fmadd_ps(u, b1, acc[r][1]);
                    }
                }
                UNR for (int r = 0; r < 4; r++) UNR for (int x = 0; x < 2; x++) {
                    float* p = dst + (r1 + r) * D + j + 8 * x;
                    if (LAST) _mm256_stream_ps(p, acc[r][x]); else st(p, acc[r][x]);
                }
            }
    }
}
struct Args { const float *q, *k, *v, *a, *b, *dt, *Aexp; float* out; float scale; int Hk, Hv, R; };
template <int NV>
static void chunk(const Args& A, Work& w, int64_t t0, int m, int kh, const float* const* src, float* const* dst, bool first, bool last) {
    constexpr int C = 4 * NV, W = 8 * NV;
/*PACK*/    const float* from[W];
    for (int t = 0; t < C; t++) {
        size_t off = ((t0 + t) * A.Hk + kh) * D;
        from[t] = t < m ? A.k + off : ZERO; from[C + t] = t < m ? A.q + off : ZERO;
        memcpy(w.K + t * D, from[t], 4 * D);
    }
    pack(w.KQ, W, W, from);
    constexpr int GR = NV == 4 ? 2 : 4;
    for (int s = 0; s < C; s += GR) {
        F acc[GR][NV]; dots<NV, GR>(w.K + s * D, w.KQ, acc);
        UNR for (int r = 0; r < GR; r++) UNR for (int j = 0; j < NV; j++) st(w.KK + (s + r) * W + 8 * j, acc[r][j]);
    }
    alignas(32) int mk[W];
    for (int j = 0; j < W; j++) mk[j] = j >= C ? -1 : 0;
    F mask[NV];
    UNR for (int j = 0; j < NV; j++) mask[j] = ld((float*)mk + 8 * j);
    float gg[C][8], bb[C][8];  // the gates of 8 heads around this one: no pass over all tokens, no barrier
    int hb = -1;
    for (int hr = 0; hr < A.R; hr++) {
        int h = kh * A.R + hr;
        if (h / 8 * 8 != hb) {
            hb = h / 8 * 8;
            for (int t = 0; t < m; t++) {
                size_t o = (t0 + t) * A.Hv + hb;
                gates(A.a + o, A.b + o, A.dt + hb, A.Aexp + hb, gg[t], bb[t]);
            }
        }
        float g[C], beta[C], cum[C], end[C];
        for (int t = 0; t < C; t++) {
            g[t] = 1; beta[t] = 0;
            if (t < m) {
                g[t] = gg[t][h - hb]; beta[t] = bb[t][h - hb];
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
/*VPACK*/        float* to[W];
        for (int t = 0; t < C; t++) {
            size_t off = ((t0 + t) * A.Hv + h) * D;
            from[t] = t < m ? A.v + off : ZERO; from[C + t] = ZERO;
            to[t] = w.dummy; to[C + t] = t < m ? A.out + off : w.dummy;
        }
        pack(w.VT, W, C, from);
        if (last) { if (first) rows<NV, true, true>(src[hr], dst[hr], w, cum[C - 1], mask); else rows<NV, true, false>(src[hr], dst[hr], w, cum[C - 1], mask); }
        else { if (first) rows<NV, false, true>(src[hr], dst[hr], w, cum[C - 1], mask); else rows<NV, false, false>(src[hr], dst[hr], w, cum[C - 1], mask); }
/*OPACK*/        unpack(w.RES, W, C / 8 * 8, to);
    }
}
extern "C" void gdn(const float* q, const float* k, const float* v, const float* state, const float* A_log,
                    const float* a, const float* dt_bias, const float* b, const int64_t* cu, float* out, float* ns,
                    float scale, int N, int T, int Hk, int Hv) {
    int R = Hv / Hk;
    std::vector<int> order(N);
    for (int i = 0; i < N; i++) order[i] = i;
    std::sort(order.begin(), order.end(), [&](int x, int y) { return cu[x + 1] - cu[x] > cu[y + 1] - cu[y]; });
    if (Hv % 8) abort();
    std::vector<float> Aexp;
    Aexp.resize(Hv);
    for (int h = 0; h < Hv; h++) Aexp[h] = std::exp(A_log[h]);
    Args A{q, k, v, a, b, dt_bias, Aexp.data(), out, scale, Hk, Hv, R};
    std::atomic<int> tickets{0}, lo{0}, hi{0};
    #pragma omp parallel
    {
    // Even threads take the longest tasks first (bound by arithmetic), odd ones the shortest (bound by memory).
    bool back = omp_get_thread_num() & 1;
    while (tickets.fetch_add(1) < N * Hk) {
        int task = back ? N * Hk - 1 - hi.fetch_add(1) : lo.fetch_add(1);
        static thread_local Work* wp = nullptr;
        if (!wp) wp = new Work;
        Work& w = *wp;
        int n = order[task / Hk], kh = task % Hk;
        // at most two value heads at a time
        int L = cu[n + 1] - cu[n];
        int nch = (L + CUSE - 1) / CUSE, per = (L + nch - 1) / nch;
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
                case 1: chunk<1>(A, w, cu[n] + t, m, kh, src, dst, t == 0, last); break;
                case 2: chunk<2>(A, w, cu[n] + t, m, kh, src, dst, t == 0, last); break;
                case 3: chunk<3>(A, w, cu[n] + t, m, kh, src, dst, t == 0, last); break;
                default: chunk<4>(A, w, cu[n] + t, m, kh, src, dst, t == 0, last);
            }
        }
        _mm_sfence();
    }
    }
}
