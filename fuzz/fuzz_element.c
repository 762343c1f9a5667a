/* fuzz_element.c: any float and any code in every element: rounding to nearest is correct, representable values
 * are unchanged, stochastic rounding picks one of two neighbours. libFuzzer; 13 bytes per number. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "opaq/opaq.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void expect(int condition) {
    if (!condition) {
        abort();
    }
}

static uint32_t code_mask(const struct opaq_element_info *info) {
    return info->bits == 32 ? 0xFFFFFFFFu : (1u << info->bits) - 1u;
}

static int has_sign(enum opaq_element element) { return element != OPAQ_E8M0; }

/* Encoding a decoded code gives the code, except for NaNs, which have one code each. */
static void check_code(enum opaq_element element, const struct opaq_element_info *info, uint32_t code) {
    code &= code_mask(info);
    const float value = opaq_element_decode(element, code);
    if (isnan(value)) {
        expect(info->has_nan);
        for (int overflow = 0; overflow <= 1; ++overflow) {
            const uint32_t nan = opaq_element_encode(element, value, (enum opaq_overflow)overflow);
            expect(isnan(opaq_element_decode(element, nan)));
        }
        return;
    }
    if (isinf(value)) {
        expect(info->has_infinity && opaq_element_encode(element, value, OPAQ_IEEE) == code);
        return;
    }
    expect(fabsf(value) <= info->largest);
    expect(opaq_element_encode(element, value, OPAQ_SATURATE) == code);
    expect(opaq_element_encode(element, value, OPAQ_IEEE) == code);
    if (element != OPAQ_E8M0) {
        expect(opaq_element_encode_stochastic(element, value, code * 2654435761u) == code);
    }
}

/* The code's neighbours by magnitude; codes of one sign are consecutive. */
static void check_nearest(enum opaq_element element, const struct opaq_element_info *info, float value) {
    const uint32_t sign = has_sign(element) ? 1u << (info->bits - 1) : 0;
    const uint32_t code = opaq_element_encode(element, value, OPAQ_SATURATE);
    const double exact = fabs((double)value);
    const double chosen = fabs((double)opaq_element_decode(element, code));
    const uint32_t magnitude = code & ~sign;
    expect(code <= code_mask(info) && (!has_sign(element) || !!(code & sign) == !!signbit(value)));
    const double down = magnitude > 0 ? fabs((double)opaq_element_decode(element, magnitude - 1)) : chosen;
    const int is_last = ((magnitude + 1) & sign) != 0;
    const double up = is_last ? (double)INFINITY : (double)opaq_element_decode(element, magnitude + 1);
    expect(fabs(exact - chosen) <= fabs(exact - down));
    if (up <= (double)info->largest) { /* not for infinities and NaNs */
        expect(fabs(exact - chosen) <= fabs(exact - up));
        expect(fabs(exact - chosen) < fabs(exact - up) || magnitude % 2 == 0 || element == OPAQ_E8M0);
    }
}

static void check_stochastic(enum opaq_element element, const struct opaq_element_info *info, float value,
                             uint32_t random) {
    const uint32_t sign = 1u << (info->bits - 1);
    const uint32_t cut = opaq_element_encode_stochastic(element, value, 0);
    const uint32_t code = opaq_element_encode_stochastic(element, value, random);
    const double exact = fmin(fabs((double)value), (double)info->largest);
    expect((code & sign) == (cut & sign) && !!(code & sign) == !!signbit(value));
    expect(code == cut || code == cut + 1); /* up by one code at most, never down */
    expect(fabs((double)opaq_element_decode(element, cut)) <= exact);
    expect(fabs((double)opaq_element_decode(element, code)) <= (double)info->largest);
}

static void check_value(enum opaq_element element, const struct opaq_element_info *info, float value,
                        uint32_t random) {
    const uint32_t saturated = opaq_element_encode(element, value, OPAQ_SATURATE);
    const uint32_t ieee = opaq_element_encode(element, value, OPAQ_IEEE);
    uint32_t codes[3] = {0, 0xA5A5A5A5u, 0};
    float back[2] = {0.0f, -7.0f};
    opaq_element_encode_array(element, &value, 1, OPAQ_SATURATE, codes);
    expect((codes[0] & code_mask(info)) == saturated && codes[1] == 0xA5A5A5A5u);
    opaq_element_encode_stochastic_array(element, &value, &random, 1, codes);
    expect((codes[0] & code_mask(info)) == opaq_element_encode_stochastic(element, value, random));
    opaq_element_decode_array(element, codes, 1, back);
    expect(back[1] == -7.0f);
    if (isnan(value)) {
        expect(!info->has_nan || isnan(opaq_element_decode(element, saturated)));
        expect(!info->has_nan || isnan(opaq_element_decode(element, ieee)));
        return;
    }
    if (element == OPAQ_E8M0 && !(value > 0.0f)) {
        expect(saturated == 255 && ieee == 255);
        return;
    }
    expect(fabsf(opaq_element_decode(element, saturated)) <= info->largest);
    if (element == OPAQ_F32) {
        return;
    }
    /* e8m0 always rounds up below 2^-126 */
    if (isfinite(value) && !(element == OPAQ_E8M0 && value < 0x1p-126f)) {
        check_nearest(element, info, value);
    }
    if (element != OPAQ_E8M0) {
        check_stochastic(element, info, value, random);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    for (; size >= 13; data += 13, size -= 13) {
        const int number = data[0] % (OPAQ_ELEMENT_COUNT + 1);
        const enum opaq_element element = (enum opaq_element)number;
        const struct opaq_element_info *info = opaq_element_info(element);
        float value;
        uint32_t code;
        uint32_t random;
        memcpy(&value, data + 1, 4);
        memcpy(&code, data + 5, 4);
        memcpy(&random, data + 9, 4);
        if (info == NULL) { /* an unknown element: a result all the same */
            expect(number == OPAQ_ELEMENT_COUNT && isnan(opaq_element_decode(element, code)));
            expect(opaq_element_encode(element, value, OPAQ_IEEE) == 0);
            expect(opaq_element_encode_stochastic(element, value, random) == 0);
            continue;
        }
        check_code(element, info, code);
        check_value(element, info, value, random);
    }
    return 0;
}
