/* Correctly rounded sums: the exact sum rounded once, to nearest even. The bits of the result do
 * not depend on the order of the summands, on zeros among them, or on how a message is split.
 *
 * A sum of two is the processor's addition. For more, an accumulator has two doubles: the second
 * takes the rounding error of the first (TwoSum: Knuth, The Art of Computer Programming 2, section
 * 4.2.2; cascaded: Ogita, Rump, Oishi, SIAM J. Sci. Comput. 26(6), 2005). Their sum is exact unless
 * an addition to the second one is rounded, which cannot happen if the magnitudes of the summands
 * differ by less than 2^52, or for float32 2^81, over the number of ranks. Sums that lost something,
 * and sums of infinities, NaN or numbers close to the greatest, are computed again with integers, in
 * a fixed-point number that covers float64's full range (Neal, Fast exact summation using small and
 * large superaccumulators, 2015).
 *
 * Sums of float32 are first rounded to odd: the last bit records that something was rounded away,
 * so a second rounding to nearest gives the same result as a single one (Boldo, Melquiond, IEEE
 * Trans. Comput. 57(4), 2008). Narrow floats are summed as float32 and then rounded to their format.
 *
 * Two results are fixed: a sum that is zero is 0.0, never -0.0 (which would depend on zeros of
 * other ranks); and NaN has neither sign nor payload. */

#include "kernels.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The error terms below are zero in real arithmetic. */
#ifdef __FAST_MATH__
#error "exact.c must not be compiled with -ffast-math"
#endif

/* Elements of a block: the accumulators of a block stay in the first-level cache. */
enum { BLOCK = 512 };

typedef float __attribute__((may_alias, aligned(1))) any_float32;
typedef double __attribute__((may_alias, aligned(1))) any_float64;

/* The sums of a block: sum + rest, unless something was lost. */
struct sums {
    _Alignas(64) double sum[BLOCK];
    _Alignas(64) double rest[BLOCK];
    _Alignas(64) uint64_t lost[BLOCK]; /* nonzero: this sum is not exact or not finite */
};

static inline uint64_t bits_of_double(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline double double_of_bits(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* *sum + *error = a + b exactly, *sum = a + b rounded. If *sum is not finite, neither is *error. */
static inline __attribute__((always_inline)) void two_sum(double a, double b, double *sum,
                                                          double *error)
{
    const double s = a + b, from_b = s - a;
    *error = (a - (s - from_b)) + (b - from_b);
    *sum = s;
}

/* Returns sum if sum + correction is exact, else the neighbor of the exact value whose last bit is
 * set. sum is the double nearest to sum + correction. */
static inline __attribute__((always_inline)) double rounded_to_odd(double sum, double correction)
{
    const uint64_t bits = bits_of_double(sum), odd = bits & 1;
    /* Incrementing the bits increases the magnitude, so a negative number steps in reverse. */
    const uint64_t outward = sum < 0 ? (uint64_t)-1 : 1;
    const uint64_t step = correction > 0 ? outward : correction < 0 ? -outward : 0;
    return double_of_bits(bits + (odd ? 0 : step));
}

#define ROUND_float32(SUM, REST, OUT)                                                              \
    double nearest, correction;                                                                    \
    two_sum(SUM, REST, &nearest, &correction);                                                     \
    const float OUT = (float)rounded_to_odd(nearest, correction) + 0.0f

#define ROUND_float64(SUM, REST, OUT) const double OUT = (SUM + REST) + 0.0

/* pair:   out = left + right; out may be either operand.
 * start:  accumulators of two operands.
 * add:    adds one more operand; returns nonzero if anything was lost.
 * finish: out = the sums.
 * divide: out = out / divisor. */
#define LOOPS(NAME, TYPE)                                                                          \
    VECTORISED static void pair_##NAME(const void *left, const void *right, void *out,             \
                                       size_t count)                                               \
    {                                                                                              \
        const any_##NAME *a = left, *b = right;                                                    \
        any_##NAME *to = out;                                                                      \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                             \
        {                                                                                          \
            const TYPE sum = (a[i] + b[i]) + (TYPE)0;                                              \
            to[i] = sum == sum ? sum : (TYPE)NAN;                                                  \
        }                                                                                          \
    }                                                                                              \
    VECTORISED static void start_##NAME(struct sums *sums, const void *left, const void *right,    \
                                        size_t count)                                              \
    {                                                                                              \
        const any_##NAME *a = left, *b = right;                                                    \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                             \
        {                                                                                          \
            two_sum(a[i], b[i], &sums->sum[i], &sums->rest[i]);                                    \
            sums->lost[i] = 0;                                                                     \
        }                                                                                          \
    }                                                                                              \
    VECTORISED static uint64_t add_##NAME(struct sums *sums, const void *source, size_t count)     \
    {                                                                                              \
        const any_##NAME *from = source;                                                           \
        uint64_t any = 0;                                                                          \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                             \
        {                                                                                          \
            double error, lost;                                                                    \
            two_sum(sums->sum[i], from[i], &sums->sum[i], &error);                                 \
            two_sum(sums->rest[i], error, &sums->rest[i], &lost);                                  \
            any |= sums->lost[i] |= bits_of_double(lost) << 1; /* without the sign */              \
        }                                                                                          \
        return any;                                                                                \
    }                                                                                              \
    VECTORISED static void finish_##NAME(const struct sums *sums, void *out, size_t count)         \
    {                                                                                              \
        any_##NAME *to = out;                                                                      \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                             \
        {                                                                                          \
            ROUND_##NAME(sums->sum[i], sums->rest[i], sum);                                        \
            to[i] = sum == sum ? sum : (TYPE)NAN;                                                  \
        }                                                                                          \
    }                                                                                              \
    VECTORISED static void divide_##NAME(void *out, double divisor, size_t count)                  \
    {                                                                                              \
        any_##NAME *to = out;                                                                      \
        for (size_t i = 0; i < count; i++)                                                         \
            to[i] /= (TYPE)divisor;                                                                \
    }
LOOPS(float32, float)
LOOPS(float64, double)

static const struct loops {
    void (*pair)(const void *left, const void *right, void *out, size_t count);
    void (*start)(struct sums *sums, const void *left, const void *right, size_t count);
    uint64_t (*add)(struct sums *sums, const void *source, size_t count);
    void (*finish)(const struct sums *sums, void *out, size_t count);
    void (*divide)(void *out, double divisor, size_t count);
} of_float32 = {pair_float32, start_float32, add_float32, finish_float32, divide_float32},
  of_float64 = {pair_float64, start_float64, add_float64, finish_float64, divide_float64};

/* ---- In integers ----------------------------------------------------------------------------- */

/* A fixed-point number: limb i counts 2^(32 i) times the smallest double, 2^-1074. Limbs have room
 * for the carries of 2^30 summands, which are propagated at the end. Two extra limbs below are
 * zero. */
enum { BELOW = 2, LIMBS = BELOW + 68 };

struct fixed {
    int64_t limbs[LIMBS];
    int low, high;  /* the range of nonzero limbs */
    double special; /* the sum of the infinities and NaN, or 0 */
};

static void fixed_add(struct fixed *fixed, double value)
{
    const uint64_t bits = bits_of_double(value), fraction = bits & ((UINT64_C(1) << 52) - 1);
    const int exponent = (int)(bits >> 52 & 0x7ff), shift = exponent ? exponent - 1 : 0;
    const int64_t mantissa = (int64_t)(exponent ? fraction | UINT64_C(1) << 52 : fraction);
    const int at = BELOW + shift / 32;

    if (exponent == 0x7ff)
        fixed->special += value;
    if (exponent == 0x7ff || !mantissa)
        return;
    /* Shifts of negative numbers are arithmetic in all known compilers. */
    const __int128 number =
        (__int128)(value < 0 ? -mantissa : mantissa) * (INT64_C(1) << shift % 32);
    fixed->limbs[at] += (int64_t)(number & 0xffffffff);
    fixed->limbs[at + 1] += (int64_t)(number >> 32 & 0xffffffff);
    fixed->limbs[at + 2] += (int64_t)(number >> 64);
    if (at < fixed->low)
        fixed->low = at;
    if (at + 3 > fixed->high)
        fixed->high = at + 3; /* the limb that carries can reach */
}

/* Reduces limbs to 32 bits; returns the carry out of the highest. */
static int64_t carry(struct fixed *fixed, int64_t sign)
{
    int64_t carried = 0;
    for (int i = fixed->low; i <= fixed->high; i++) {
        const int64_t limb = sign * fixed->limbs[i] + carried;
        fixed->limbs[i] = limb & 0xffffffff;
        carried = limb >> 32;
    }
    return carried;
}

/* Returns the number as a double, rounded to nearest even or to odd. */
static double fixed_rounded(struct fixed *fixed, int to_odd)
{
    double sign = 1;
    uint64_t mantissa, rest;
    int top, shift;

    if (fixed->special != 0) /* infinite or NaN */
        return fixed->special;
    if (carry(fixed, 1)) { /* the two's complement of a negative number: use its magnitude */
        sign = -1;
        carry(fixed, -1);
    }
    for (top = fixed->high; top >= fixed->low && !fixed->limbs[top]; top--) {
    }
    if (top < fixed->low)
        return 0;
    /* The 64 highest bits; the last bit is also set if any lower bit is. */
    mantissa = (uint64_t)fixed->limbs[top] << 32 | (uint64_t)fixed->limbs[top - 1];
    shift = __builtin_clzll(mantissa);
    rest = (uint64_t)fixed->limbs[top - 2] << shift;
    mantissa = mantissa << shift | rest >> 32;
    rest &= 0xffffffff;
    for (int i = top - 3; i >= fixed->low && !rest; i--)
        rest = (uint64_t)fixed->limbs[i];
    mantissa |= rest != 0;
    if (to_odd)
        mantissa = (mantissa & ~UINT64_C(0x7ff)) | (UINT64_C(0x800) * ((mantissa & 0x7ff) != 0));
    /* ldexp rounds nothing: sums are multiples of 2^-1074. */
    return sign * ldexp((double)mantissa, 32 * (top - 1 - BELOW) - shift - 1074);
}

/* ---- All formats ----------------------------------------------------------------------------- */

/* Returns element i of a source of float64, float32 or a narrow float, depending on its size. */
static double element(int format, size_t size, const char *source, size_t i)
{
    float value;
    double wide;

    source += i * size;
    if (size == sizeof(double)) {
        memcpy(&wide, source, sizeof wide);
        return wide;
    }
    if (size == sizeof(float))
        memcpy(&value, source, sizeof value);
    else
        mpicoll_widen(format, source, &value, 1);
    return value;
}

/* Recomputes the sums that lost something, of elements from `start` on, with integers. */
static void repair(struct sums *sums, int format, const char *const *sources, size_t n,
                   size_t start, size_t count)
{
    const size_t size = mpicoll_size(format);
    struct fixed fixed = {.low = LIMBS, .high = 0};

    for (size_t i = 0; i < count; i++) {
        if (!sums->lost[i])
            continue;
        for (size_t k = 0; k < n; k++)
            fixed_add(&fixed, element(format, size, sources[k], start + i));
        sums->sum[i] = fixed_rounded(&fixed, size != sizeof(double));
        sums->rest[i] = 0;
        while (fixed.low <= fixed.high)
            fixed.limbs[fixed.low++] = 0;
        fixed.low = LIMBS;
        fixed.high = 0;
        fixed.special = 0;
    }
}

/* out = (sum of n sources) / divisor, of float32, float64 or narrow floats: mpicoll_combine. */
void mpicoll_exact_sum(int format, const char *const *sources, size_t n, char *out, size_t count,
                       double divisor)
{
    static const double zeros[BLOCK];
    const size_t size = mpicoll_size(format);
    const int narrow = size < sizeof(float);
    const struct loops *loops = size == sizeof(double) ? &of_float64 : &of_float32;
    _Alignas(64) float widened[2][BLOCK];
    struct sums sums;

    for (size_t start = 0; start < count; start += BLOCK) {
        const size_t length = count - start < BLOCK ? count - start : BLOCK;
        const void *before = NULL;
        void *into = narrow ? (void *)widened[0] : out + start * size;
        uint64_t lost = 0;

        for (size_t k = 0; k < n || k < 2; k++) {
            const void *from = k < n ? (const void *)(sources[k] + start * size) : zeros;
            if (narrow && k < n) {
                mpicoll_widen(format, from, widened[k % 2], length);
                from = widened[k % 2];
            }
            if (k == 0)
                before = from;
            else if (n <= 2)
                loops->pair(before, from, into, length);
            else if (k == 1)
                loops->start(&sums, before, from, length);
            else
                lost |= loops->add(&sums, from, length);
        }
        if (lost)
            repair(&sums, format, sources, n, start, length);
        if (n > 2)
            loops->finish(&sums, into, length);
        if (divisor != 1)
            loops->divide(into, divisor, length);
        if (narrow)
            mpicoll_narrow(format, into, out + start * size, length);
    }
}
