/* format/element.c: the public functions over element_codec.h, with checks. */
#include "opaq/element.h"

#include <stddef.h>

#include "base/fp_environment.h"
#include "format/element_codec.h"

/* In the order of enum opaq_element. */
static const struct opaq_element_info infos[OPAQ_ELEMENT_COUNT] = {
    {"e2m1", 4, 2, 1, 1, 6.0f, 0, 0},
    {"e4m3", 8, 4, 3, 7, 448.0f, 0, 1},
    {"e5m2", 8, 5, 2, 15, 57344.0f, 1, 1},
    {"e8m0", 8, 8, 0, 127, 0x1p127f, 0, 1},
    {"f16", 16, 5, 10, 15, 65504.0f, 1, 1},
    {"bf16", 16, 8, 7, 127, 0x1.FEp127f, 1, 1},
    {"f32", 32, 8, 23, 127, 0x1.FFFFFEp127f, 1, 1},
};

const struct opaq_element_info *opaq_element_info(enum opaq_element element) {
    return (unsigned)element < OPAQ_ELEMENT_COUNT ? &infos[element] : NULL;
}

float opaq_element_decode(enum opaq_element element, uint32_t code) {
    switch (element) {
    case OPAQ_E2M1:
        return decode_e2m1(code & 0xFu);
    case OPAQ_E4M3:
        return decode_e4m3(code & 0xFFu);
    case OPAQ_E5M2:
        return decode_e5m2(code & 0xFFu);
    case OPAQ_E8M0:
        return decode_e8m0(code & 0xFFu);
    case OPAQ_F16:
        return decode_f16(code & 0xFFFFu);
    case OPAQ_BF16:
        return decode_bf16(code & 0xFFFFu);
    case OPAQ_F32:
        return float_from_bits(code);
    }
    return float_nan();
}

/* Rounds to the nearest power of two, halves up; only positive finite numbers have one. */
static uint32_t encode_e8m0(float value, bool ieee) {
    const uint32_t bits = float_to_bits(value);
    if (bits == 0x7F800000u && !ieee) {
        return 254;
    }
    if (bits == 0 || bits >= 0x7F800000u) {
        return 255;
    }
    const uint32_t field = bits >> 23;
    const uint32_t mantissa = bits & 0x7FFFFFu;
    if (field == 0) { /* above 2^-127, whose mantissa is 0x400000, ml_dtypes and PyTorch round up */
        return mantissa > 0x400000u;
    }
    const uint32_t code = field + (mantissa >= 0x400000u);
    return code == 255 && !ieee ? 254 : code;
}

static uint32_t encode_f32(float value, bool ieee) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t sign = bits & 0x80000000u;
    if (float_is_nan(value)) {
        return ieee ? sign | 0x7FC00000u : 0x7FC00000u;
    }
    return ieee || float_is_finite(value) ? bits : sign | 0x7F7FFFFFu;
}

uint32_t opaq_element_encode(enum opaq_element element, float value, enum opaq_overflow overflow) {
    const bool ieee = overflow == OPAQ_IEEE;
    switch (element) {
    case OPAQ_E2M1:
        return narrow_encode(value, narrow_e2m1, ieee);
    case OPAQ_E4M3:
        return narrow_encode(value, narrow_e4m3, ieee);
    case OPAQ_E5M2:
        return narrow_encode(value, narrow_e5m2, ieee);
    case OPAQ_E8M0:
        return encode_e8m0(value, ieee);
    case OPAQ_F16:
        return narrow_encode(value, narrow_f16, ieee);
    case OPAQ_BF16:
        return narrow_encode(value, narrow_bf16, ieee);
    case OPAQ_F32:
        return encode_f32(value, ieee);
    }
    return 0;
}

/* value| + u * 2^e truncated to a power of two, e being value's own exponent. */
static uint32_t encode_e8m0_stochastic(float value, uint32_t random) {
    const uint32_t bits = float_to_bits(value);
    if (bits == 0 || bits > 0x7F800000u) {
        return 255;
    }
    if (bits < 0x400000u) {
        return 0;
    }
    const uint32_t field = bits >> 23;
    const float step = decode_e8m0(field > 254 ? 254 : field);
    const float jittered = value + (float)(random & 0xFFu) * 0x1p-8f * step;
    const uint32_t code = float_to_bits(jittered) >> 23;
    return code > 254 ? 254 : code;
}

static uint32_t encode_stochastic(enum opaq_element element, float value, uint32_t random) {
    switch (element) {
    case OPAQ_E2M1:
        return narrow_encode_stochastic(value, narrow_e2m1, random, 8);
    case OPAQ_E4M3:
        return narrow_encode_stochastic(value, narrow_e4m3, random, 8);
    case OPAQ_E5M2:
        return narrow_encode_stochastic(value, narrow_e5m2, random, 8);
    case OPAQ_E8M0:
        return encode_e8m0_stochastic(value, random);
    case OPAQ_F16:
        return narrow_encode_stochastic(value, narrow_f16, random, 13);
    case OPAQ_BF16:
        return narrow_encode_stochastic(value, narrow_bf16, random, 16);
    case OPAQ_F32:
        return encode_f32(value, false);
    }
    return 0;
}

uint32_t opaq_element_encode_stochastic(enum opaq_element element, float value, uint32_t random) {
    const uint64_t saved = fp_environment_enter();
    const uint32_t code = encode_stochastic(element, value, random);
    fp_environment_leave(saved);
    return code;
}

static int code_bytes(enum opaq_element element) {
    const struct opaq_element_info *info = opaq_element_info(element);
    return info == NULL || info->bits <= 8 ? 1 : info->bits / 8;
}

static uint32_t code_load(const void *codes, int64_t index, int bytes) {
    if (bytes == 1) {
        return ((const uint8_t *)codes)[index];
    }
    return bytes == 2 ? ((const uint16_t *)codes)[index] : ((const uint32_t *)codes)[index];
}

static void code_store(void *codes, int64_t index, int bytes, uint32_t code) {
    if (bytes == 1) {
        ((uint8_t *)codes)[index] = (uint8_t)code;
    } else if (bytes == 2) {
        ((uint16_t *)codes)[index] = (uint16_t)code;
    } else {
        ((uint32_t *)codes)[index] = code;
    }
}

void opaq_element_decode_array(enum opaq_element element, const void *codes, int64_t count, float *values) {
    const int bytes = code_bytes(element);
    for (int64_t i = 0; codes != NULL && values != NULL && i < count; ++i) {
        values[i] = opaq_element_decode(element, code_load(codes, i, bytes));
    }
}

void opaq_element_encode_array(enum opaq_element element, const float *values, int64_t count,
                               enum opaq_overflow overflow, void *codes) {
    const int bytes = code_bytes(element);
    for (int64_t i = 0; values != NULL && codes != NULL && i < count; ++i) {
        code_store(codes, i, bytes, opaq_element_encode(element, values[i], overflow));
    }
}

void opaq_element_encode_stochastic_array(enum opaq_element element, const float *values,
                                          const uint32_t *random, int64_t count, void *codes) {
    const int bytes = code_bytes(element);
    const uint64_t saved = fp_environment_enter();
    for (int64_t i = 0; values != NULL && random != NULL && codes != NULL && i < count; ++i) {
        code_store(codes, i, bytes, encode_stochastic(element, values[i], random[i]));
    }
    fp_environment_leave(saved);
}
