/* PTX instructions as C functions and macros. Translated kernels include this file.
 *
 * Registers are unsigned integers. Floats are read and written through bit casts. All single
 * precision results that are NaN have the bits that NVIDIA's GPUs produce, 0x7fffffff. */
#include <math.h>
#include <string.h>
#include <time.h>

#include "kernel.h"

#define FUNCTION static inline __attribute__((always_inline, unused))
#define SLOW static __attribute__((noinline, unused))

/* ---- Control ---------------------------------------------------------------------------------- */

#define SUSPEND(POINT, OUTCOME)                                                                    \
    {                                                                                              \
        thread->resume = POINT;                                                                    \
        return OUTCOME;                                                                            \
    }                                                                                              \
    case POINT:;

/* Let other threads run now and then. */
#define POLL(POINT)                                                                                \
    if (++thread->polls % 4 == 0)                                                                  \
    SUSPEND(POINT, YIELDED)

#define FAULT(ERROR, ADDRESS, INSTRUCTION)                                                         \
    {                                                                                              \
        thread->fault = ERROR;                                                                     \
        thread->fault_address = ADDRESS;                                                           \
        thread->fault_instruction = INSTRUCTION;                                                   \
        return FAULTED;                                                                            \
    }

#define ILLEGAL_ADDRESS 700
#define ASSERTION 710
#define MISALIGNED_ADDRESS 716
#define LAUNCH_FAILURE 719

/* ---- Memory ----------------------------------------------------------------------------------- */

#define CHECK_ALIGNED(ADDRESS, BYTES, INSTRUCTION)                                                 \
    if ((ADDRESS) % (BYTES))                                                                       \
    FAULT(MISALIGNED_ADDRESS, ADDRESS, INSTRUCTION)

/* Addresses in shared memory are offsets, as on a GPU; generic addresses are the host's. */
#define CHECK_SHARED(OFFSET, BYTES, INSTRUCTION)                                                   \
    if ((OFFSET) + (uint64_t)(BYTES) > block->shared_bytes)                                        \
    FAULT(ILLEGAL_ADDRESS, OFFSET, INSTRUCTION)

/* The previous value of *PLACE, which becomes VALUE, an expression of `old`. */
#define ATOMIC(TYPE, PLACE, ORDER, VALUE)                                                          \
    ({                                                                                             \
        TYPE *const place = (TYPE *)(PLACE);                                                       \
        TYPE old = __atomic_load_n(place, __ATOMIC_RELAXED);                                       \
        while (!__atomic_compare_exchange_n(place, &old, (TYPE)(VALUE), 0, ORDER,                  \
                                            __ATOMIC_RELAXED))                                     \
            ;                                                                                      \
        old;                                                                                       \
    })

#define COMPARE_AND_SWAP(TYPE, PLACE, ORDER, EXPECTED, VALUE)                                      \
    ({                                                                                             \
        TYPE old = (EXPECTED);                                                                     \
        __atomic_compare_exchange_n((TYPE *)(PLACE), &old, (TYPE)(VALUE), 0, ORDER,                \
                                    __ATOMIC_RELAXED);                                             \
        old;                                                                                       \
    })

/* ---- Bit casts -------------------------------------------------------------------------------- */

#define CASTS(NAME, TYPE, BITS)                                                                    \
    FUNCTION TYPE to_##NAME(BITS bits)                                                             \
    {                                                                                              \
        TYPE value;                                                                                \
        memcpy(&value, &bits, sizeof value);                                                       \
        return value;                                                                              \
    }                                                                                              \
    FUNCTION BITS from_##NAME(TYPE value)                                                          \
    {                                                                                              \
        BITS bits;                                                                                 \
        memcpy(&bits, &value, sizeof bits);                                                        \
        return bits;                                                                               \
    }
CASTS(f32, float, uint32_t)
CASTS(f64, double, uint64_t)

FUNCTION double to_f16(uint16_t bits)
{
    _Float16 value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
FUNCTION uint16_t from_f16(double x)
{
    const _Float16 value = x;
    uint16_t bits;
    memcpy(&bits, &value, sizeof bits);
    return x != x ? 0x7fff : bits;
}

/* ---- Single and double precision --------------------------------------------------------------- */

FUNCTION float canonical(float x)
{
    return x != x ? to_f32(0x7fffffff) : x;
}
/* Flush a subnormal number to zero, and keep its sign. */
FUNCTION float ftz(float x)
{
    const uint32_t bits = from_f32(x);
    return bits & 0x7f800000 ? x : to_f32(bits & 0x80000000);
}
/* NaN becomes zero. */
FUNCTION double sat(double x)
{
    return x > 0 ? x < 1 ? x : 1 : 0;
}

/* A number is preferred to NaN, and -0 is less than 0. */
#define EXTREMA(NAME, TYPE)                                                                        \
    FUNCTION TYPE min_##NAME(TYPE a, TYPE b)                                                       \
    {                                                                                              \
        return a != a ? b : b != b ? a : a < b || (a == b && signbit(a)) ? a : b;                  \
    }                                                                                              \
    FUNCTION TYPE max_##NAME(TYPE a, TYPE b)                                                       \
    {                                                                                              \
        return a != a ? b : b != b ? a : a > b || (a == b && !signbit(a)) ? a : b;                 \
    }
EXTREMA(f32, float)
EXTREMA(f64, double)

/* ---- Conversions of floats to integers ---------------------------------------------------------- */

/* Out of range: the nearest integer. */
#define TO_INTEGER(NAME, TYPE, LEAST, MOST, LIMIT)                                                 \
    FUNCTION TYPE integer_##NAME(double x, TYPE of_nan)                                            \
    {                                                                                              \
        return x != x ? of_nan : x >= LIMIT ? MOST : x < (double)LEAST ? LEAST : (TYPE)x;          \
    }
TO_INTEGER(s8, int8_t, INT8_MIN, INT8_MAX, 0x1p7)
TO_INTEGER(s16, int16_t, INT16_MIN, INT16_MAX, 0x1p15)
TO_INTEGER(s32, int32_t, INT32_MIN, INT32_MAX, 0x1p31)
TO_INTEGER(s64, int64_t, INT64_MIN, INT64_MAX, 0x1p63)
TO_INTEGER(u8, uint8_t, 0, UINT8_MAX, 0x1p8)
TO_INTEGER(u16, uint16_t, 0, UINT16_MAX, 0x1p16)
TO_INTEGER(u32, uint32_t, 0, UINT32_MAX, 0x1p32)
TO_INTEGER(u64, uint64_t, 0, UINT64_MAX, 0x1p64)

/* ---- Integers ----------------------------------------------------------------------------------- */

/* A GPU does not trap: dividing by zero gives all ones. */
#define DIVISION(NAME, TYPE, OVERFLOWS)                                                            \
    FUNCTION TYPE div_##NAME(TYPE a, TYPE b)                                                       \
    {                                                                                              \
        return b == 0 ? (TYPE)-1 : OVERFLOWS ? (TYPE)(0 - a) : (TYPE)(a / b);                      \
    }                                                                                              \
    FUNCTION TYPE rem_##NAME(TYPE a, TYPE b)                                                       \
    {                                                                                              \
        return b == 0 ? a : OVERFLOWS ? 0 : (TYPE)(a % b);                                         \
    }
DIVISION(s16, int16_t, b == -1)
DIVISION(s32, int32_t, b == -1)
DIVISION(s64, int64_t, b == -1)
DIVISION(u16, uint16_t, 0)
DIVISION(u32, uint32_t, 0)
DIVISION(u64, uint64_t, 0)

FUNCTION uint64_t insert_bits(uint64_t a, uint64_t b, uint32_t start, uint32_t length, int width)
{
    start &= 255, length &= 255;
    for (uint32_t i = 0; i < length && start + i < (uint32_t)width; i++)
        b = (b & ~(1ull << (start + i))) | (a >> i & 1) << (start + i);
    return b;
}

/* Select 4 of the 8 bytes of b and a. Bit 3 of a selector replicates the byte's sign. */
FUNCTION uint32_t permute(uint32_t a, uint32_t b, uint32_t selectors)
{
    const uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t result = 0;

    for (int i = 0; i < 4; i++) {
        const uint32_t selector = selectors >> (4 * i) & 15;
        uint32_t byte = bytes >> (8 * (selector & 7)) & 255;
        if (selector & 8)
            byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}

SLOW uint64_t nanoseconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}
