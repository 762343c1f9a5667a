/* cli/write/scale_forms.c: see scale_forms.h. */
#include "cli/write/scale_forms.h"
#include "cli/texts.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char was[] = "opaq.was:";

static bool has_same_bits(float a, float b) {
    uint32_t a_bits = 0;
    uint32_t b_bits = 0;
    memcpy(&a_bits, &a, sizeof a);
    memcpy(&b_bits, &b, sizeof b);
    return a_bits == b_bits;
}

/* ---- forms kept in metadata ---- */

static const char *kept(const struct manifest *manifest, const struct model_tensor *tensor) {
    struct text key = {0};
    text_print(&key, "%s%s", was, tensor->tensor->name);
    const char *const value =
        st_metadata_find(&manifest->weights->model->files[tensor->file].header, text_get(&key));
    text_free(&key);
    return value;
}

static void keep(struct manifest *manifest, size_t file, const char *name, const char *value) {
    struct text key = {0};
    text_print(&key, "%s%s", was, name);
    manifest_keep_text(manifest, key.bytes);
    char *const copy = copy_text(value, strlen(value));
    manifest_keep_text(manifest, copy);
    manifest_metadata(manifest, file, key.bytes, copy);
}

void scale_forms_forget(struct manifest *manifest) {
    for (size_t i = 0; i < manifest->file_count; ++i) {
        struct manifest_file *const file = &manifest->files[i];
        size_t count = 0;
        for (size_t k = 0; k < file->metadata_count; ++k) {
            if (strncmp(file->metadata[k].key, was, strlen(was)) != 0) {
                file->metadata[count++] = file->metadata[k];
            }
        }
        file->metadata_count = count;
    }
}

/* ---- block scales ---- */

static enum opaq_status read_all(const struct manifest *manifest, const struct model_tensor *tensor,
                                 void **bytes, struct opaq_error *error) {
    *bytes = alloc_array(tensor->tensor->bytes, 1);
    return model_read(manifest->weights->model, tensor, 0, *bytes, tensor->tensor->bytes, error);
}

/* Exponents to float32. */
static void widen_exponents(const uint8_t *from, size_t count, float *to) {
    for (size_t i = 0; i < count; ++i) {
        to[i] = opaq_element_decode(OPAQ_E8M0, from[i]);
    }
}

/* Float32 to exponents; false if one is not a power of two. */
static bool narrow_exponents(const float *from, size_t count, uint8_t *to) {
    for (size_t i = 0; i < count; ++i) {
        to[i] = (uint8_t)opaq_element_encode(OPAQ_E8M0, from[i], OPAQ_SATURATE);
        const float back = opaq_element_decode(OPAQ_E8M0, to[i]);
        if (!has_same_bits(back, from[i])) {
            return false;
        }
    }
    return true;
}

enum opaq_status scale_form_convert(struct manifest *manifest, const struct model_tensor *scale,
                                    const char *dtypes, const char *name, const int64_t *shape, int rank,
                                    struct opaq_error *error) {
    const struct st_tensor *const from = scale->tensor;
    const char *const before = kept(manifest, scale);
    const bool was_exponents = before != NULL && strcmp(before, "F8_E8M0") == 0 && has_word(dtypes, before);
    const size_t count = from->dtype == ST_F32 ? from->bytes / sizeof(float) : from->bytes;
    if (from->dtype == ST_F8_E8M0 && !has_word(dtypes, "F8_E8M0")) {
        void *bytes = NULL;
        const enum opaq_status status = read_all(manifest, scale, &bytes, error);
        float *const wide = alloc_array(count, sizeof *wide);
        if (status == OPAQ_OK) {
            widen_exponents(bytes, count, wide);
            manifest_give(manifest, scale->file, name, ST_F32, shape, rank, wide);
            keep(manifest, scale->file, name, "F8_E8M0");
        }
        free(wide);
        free(bytes);
        return status;
    }
    if (from->dtype == ST_F32 && was_exponents) {
        void *bytes = NULL;
        const enum opaq_status status = read_all(manifest, scale, &bytes, error);
        uint8_t *const narrow = alloc_array(count, 1);
        const bool fits = status == OPAQ_OK && narrow_exponents(bytes, count, narrow);
        if (fits) {
            manifest_give(manifest, scale->file, name, ST_F8_E8M0, shape, rank, narrow);
        }
        free(narrow);
        free(bytes);
        if (status != OPAQ_OK || fits) {
            return status;
        }
    }
    manifest_copy(manifest, scale, name, shape, rank);
    return OPAQ_OK;
}

/* ---- global scales ---- */

/* 1 / from; false if the inverse of that is not `from`. */
static bool invert(float from, float *to) {
    *to = 1.0f / from;
    const float back = 1.0f / *to;
    return has_same_bits(back, from);
}

static void print_floats(const float *floats, size_t count, struct text *text) {
    for (size_t i = 0; i < count; ++i) {
        uint32_t bits = 0;
        memcpy(&bits, &floats[i], sizeof bits);
        text_print(text, "%08" PRIx32, bits);
    }
}

/* Parses the text of print_floats; false unless `now` are the inverses of these floats, that is, unchanged
 * since they were kept. */
static bool read_floats(const char *text, const float *now, size_t count, float *floats) {
    if (text == NULL || strlen(text) != count * 8) {
        return false;
    }
    for (size_t i = 0; i < count; ++i) {
        char digits[9] = "";
        memcpy(digits, text + i * 8, 8);
        char *end = NULL;
        const uint32_t bits = (uint32_t)strtoul(digits, &end, 16);
        memcpy(&floats[i], &bits, sizeof bits);
        const float inverted = 1.0f / floats[i];
        if (*end != '\0' || !has_same_bits(inverted, now[i])) {
            return false;
        }
    }
    return true;
}

enum opaq_status scale_form_global(struct manifest *manifest, const struct model_tensor *global,
                                   const struct opaq_layout_row *scheme, bool inverts, const char *name,
                                   struct opaq_error *error) {
    const size_t count = (size_t)(global->tensor->bytes * 8 / (uint64_t)st_dtype_bits(global->tensor->dtype));
    struct opaq_layout_shape one = {0};
    opaq_layout_shape(scheme->global_shape, scheme->format, 1, 1, &one);
    const int64_t shape[1] = {(int64_t)count};
    const int rank = count == 1 ? one.rank : 1;
    if (!inverts || global->tensor->dtype != ST_F32) {
        manifest_copy(manifest, global, name, count == 1 ? shape : NULL, rank);
        return OPAQ_OK;
    }
    void *bytes = NULL;
    const enum opaq_status status = read_all(manifest, global, &bytes, error);
    float *const inverted = alloc_array(count, sizeof *inverted);
    if (status == OPAQ_OK && !read_floats(kept(manifest, global), bytes, count, inverted)) {
        bool leads_back = true;
        const float *const floats = bytes;
        for (size_t i = 0; i < count; ++i) {
            leads_back &= invert(floats[i], &inverted[i]);
        }
        if (!leads_back) {
            struct text value = {0};
            print_floats(floats, count, &value);
            keep(manifest, global->file, name, text_get(&value));
            text_free(&value);
        }
    }
    if (status == OPAQ_OK) {
        manifest_give(manifest, global->file, name, ST_F32, shape, rank, inverted);
    }
    free(inverted);
    free(bytes);
    return status;
}
