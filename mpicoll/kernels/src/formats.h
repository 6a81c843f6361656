/* Number formats, and the conversions of narrow floats, which are too narrow to accumulate in:
 * bfloat16, float16 and float8_* (except float8_e8m0fnu, which is a scale rather than a number).
 *
 * One source for the C library and for CUDA kernels (device.cu). It is valid C and C++, and
 * includes nothing under NVRTC, CUDA's run-time compiler, which has no system headers.
 *
 * Flushing float32's own subnormals to zero does not change the results, except when a device widens,
 * which multiplies without flushing. (They are far below half
 * the smallest number of these formats; bfloat16, which has the same subnormals, is converted
 * without arithmetic.)
 *
 * The bits of a NaN are defined here, because hardware does not define them: of two NaN operands
 * either may pass on its sign and payload, depending on the operand order chosen by the compiler,
 * and inf - inf is negative on some processors. Every NaN becomes the NaN without sign that NumPy
 * and ml_dtypes make from float32's nan. (A finite value that overflows to NaN, in formats without
 * infinity, keeps its sign, as in ml_dtypes.) All other results have the bits of NumPy and
 * ml_dtypes, which forbids -ffast-math. */

#ifndef MPICOLL_FORMATS_H
#define MPICOLL_FORMATS_H

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#include <string.h>
#endif

#ifdef __CUDACC__
#define INLINE static __device__ __forceinline__
#else
#define INLINE static inline __attribute__((always_inline))
#endif

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define SIGN 0x80000000u
#define INFINITE 0x7f800000u /* greater magnitudes are NaN */
#define QUIET_NAN 0x7fc00000u

/* ---- Narrow floats ---------------------------------------------------------------------------
 *
 * FORMATS lists all of them, with the bits of an element. REGULAR_FORMATS lists those with a sign,
 * an exponent and a mantissa, with their family, the bits of the mantissa and the exponent's bias:
 *
 * IEEE: the greatest exponent means infinity and NaN.
 * FN:   no infinity, and one NaN, whose bits are all ones.
 * FNUZ: the same, except that zero has no sign: negative zero is the NaN.
 */
enum family { IEEE, FN, FNUZ };

#define REGULAR_FORMATS(X)                                                                         \
    X(float16, 16, IEEE, 10, 15)                                                                   \
    X(float8_e3m4, 8, IEEE, 4, 3)                                                                  \
    X(float8_e4m3, 8, IEEE, 3, 7)                                                                  \
    X(float8_e4m3b11fnuz, 8, FNUZ, 3, 11)                                                          \
    X(float8_e4m3fn, 8, FN, 3, 7)                                                                  \
    X(float8_e4m3fnuz, 8, FNUZ, 3, 8)                                                              \
    X(float8_e5m2, 8, IEEE, 2, 15)                                                                 \
    X(float8_e5m2fnuz, 8, FNUZ, 2, 16)

#define FORMATS(X)                                                                                 \
    X(bfloat16, 16)                                                                                \
    REGULAR_FORMATS(X)

INLINE float widen_regular(uint32_t bits, int width, enum family family, int mantissa, int bias)
{
    const int shift = 23 - mantissa;
    const uint32_t rebias = (uint32_t)(127 - bias) << 23;
    const uint32_t one = 1u << 23;
    const uint32_t sign = 1u << (width - 1);
    const uint32_t least_normal = 1u << mantissa;
    const uint32_t infinite = sign - least_normal;
    const uint32_t magnitude = bits & (sign - 1);
#ifdef __CUDA_ARCH__
    /* Subnormal numbers are not slower here: shift the exponent, then multiply by the bias. */
    const int left = 32 - width, right = left - shift;
    const int32_t shifted = (int32_t)(bits << left) >> right & (int32_t)(SIGN | ~SIGN >> right);
    float value;
    asm("mul.rn.f32 %0, %1, %2;"
        : "=f"(value)
        : "f"(float_of(shifted)), "f"(float_of((uint32_t)(254 - bias) << 23)));
    const uint32_t wide = bits_of(value);
#else
    const uint32_t normal = (magnitude << shift) + rebias;
    /* A subnormal has no implicit one: add it and subtract it again. */
    const uint32_t subnormal = bits_of(float_of(normal + one) - float_of(rebias + one));
    uint32_t wide = magnitude < least_normal ? subnormal : normal;
    wide |= (bits & sign) << (32 - width);
#endif
    switch (family) {
    case IEEE:
        return float_of(magnitude >= infinite ? wide | INFINITE : wide);
    case FN:
        return float_of(magnitude == sign - 1 ? QUIET_NAN : wide);
    default:
        return float_of(bits == sign ? QUIET_NAN : wide);
    }
}

INLINE uint32_t narrow_regular(float value, int width, enum family family, int mantissa, int bias)
{
    const int shift = 23 - mantissa;
    const uint32_t rebias = (uint32_t)(127 - bias) << 23;
    const uint32_t one = 1u << 23;
    const uint32_t sign = 1u << (width - 1);
    const uint32_t infinite = sign - (1u << mantissa);
    const uint32_t quiet = infinite | 1u << (mantissa - 1);
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & ~SIGN;
    const uint32_t signs = bits >> (32 - width) & sign;
    const int nan = magnitude > INFINITE;

    /* Add half an ulp, or slightly less if a tie must round down to even; then truncate. */
    const uint32_t half = (1u << (shift - 1)) - 1 + (magnitude >> shift & 1);
    const uint32_t normal = (magnitude - rebias + half) >> shift;
    /* Near this number, float32 has the spacing of the subnormals, and the addition rounds. */
    const uint32_t spacer = rebias + ((uint32_t)(shift + 1) << 23);
    const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(spacer)) - spacer;
    const uint32_t rounded = magnitude < rebias + one ? subnormal : normal;

    switch (family) {
    case IEEE:
        return nan ? quiet : (rounded < infinite ? rounded : infinite) | signs;
    case FN:
        return nan ? sign - 1 : (rounded < sign - 1 ? rounded : sign - 1) | signs;
    default:
        return nan || rounded >= sign ? sign : rounded ? rounded | signs : 0;
    }
}

#define CONVERTERS(NAME, WIDTH, FAMILY, MANTISSA, BIAS)                                            \
    INLINE float widen_##NAME(uint32_t bits)                                                       \
    {                                                                                              \
        return widen_regular(bits, WIDTH, FAMILY, MANTISSA, BIAS);                                 \
    }                                                                                              \
    INLINE uint32_t narrow_##NAME(float value)                                                     \
    {                                                                                              \
        return narrow_regular(value, WIDTH, FAMILY, MANTISSA, BIAS);                               \
    }
REGULAR_FORMATS(CONVERTERS)

/* bfloat16 is the upper half of a float32. */
INLINE float widen_bfloat16(uint32_t bits)
{
    return float_of(bits << 16);
}

INLINE uint32_t narrow_bfloat16(float value)
{
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & ~SIGN) > INFINITE ? QUIET_NAN >> 16 : rounded;
}

/* ---- All numbers ----------------------------------------------------------------------------- */

/* The formats without conversion: the C type, the type in which integers wrap around, and the
 * operations besides MIN and MAX. */
#define WIDE_FORMATS(X)                                                                            \
    X(float32, float, float, FLOAT)                                                                \
    X(float64, double, double, FLOAT)                                                              \
    X(bool, uint8_t, uint32_t, BOOL)                                                               \
    X(int8, int8_t, uint32_t, INTEGER)                                                             \
    X(int16, int16_t, uint32_t, INTEGER)                                                           \
    X(int32, int32_t, uint32_t, INTEGER)                                                           \
    X(int64, int64_t, uint64_t, INTEGER)                                                           \
    X(uint8, uint8_t, uint32_t, INTEGER)                                                           \
    X(uint16, uint16_t, uint32_t, INTEGER)                                                         \
    X(uint32, uint32_t, uint32_t, INTEGER)                                                         \
    X(uint64, uint64_t, uint64_t, INTEGER)

/* The index of each format in the C library's tables: narrow floats first. */
#define FORMAT_INDEX(NAME, ...) INDEX_##NAME,
enum {
    FORMATS(FORMAT_INDEX) NARROW_COUNT,
    LAST_NARROW = NARROW_COUNT - 1,
    WIDE_FORMATS(FORMAT_INDEX) FORMAT_COUNT
};

enum operation { SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, EXACT_SUM };

#endif
