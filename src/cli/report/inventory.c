/* cli/report/inventory.c: see inventory.h. */
#include "cli/report/inventory.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

char *like_pattern(const char *name) {
    struct text pattern = {0};
    while (*name != '\0') {
        const size_t length = strcspn(name, ".");
        const size_t digits = strspn(name, "0123456789");
        text_add(&pattern, digits == length && length != 0 ? "*" : name,
                 digits == length && length != 0 ? 1 : length);
        name += length;
        if (*name == '.') {
            text_add(&pattern, name++, 1);
        }
    }
    return pattern.bytes == NULL ? copy_text("", 0) : pattern.bytes;
}

static void tally_add(struct tally *tally, const struct weight *weight) {
    ++tally->count;
    tally->elements += weight_elements(weight);
    tally->bytes += weight_bytes(weight);
}

static struct tally *tally_of(struct inventory *inventory, const char *kind, size_t *capacity) {
    for (size_t i = 0; i < inventory->kind_count; ++i) {
        if (strcmp(inventory->kinds[i].kind, kind) == 0) {
            return &inventory->kinds[i];
        }
    }
    inventory->kinds = grow_array(inventory->kinds, inventory->kind_count, capacity, sizeof *inventory->kinds);
    inventory->kinds[inventory->kind_count] = (struct tally){.kind = kind};
    return &inventory->kinds[inventory->kind_count++];
}

static int compare_tallies(const void *first, const void *second) {
    const char *const a = ((const struct tally *)first)->kind;
    const char *const b = ((const struct tally *)second)->kind;
    const int is_a_plain = isupper((unsigned char)*a) != 0; /* dtypes are upper case, formats lower case */
    const int is_b_plain = isupper((unsigned char)*b) != 0;
    return is_a_plain != is_b_plain ? is_a_plain - is_b_plain : strcmp(a, b);
}

static int compare_groups(const void *first, const void *second) {
    const struct like_group *const a = first;
    const struct like_group *const b = second;
    int order = strcmp(a->pattern, b->pattern);
    if (order == 0) {
        order = strcmp(weight_kind(a->first), weight_kind(b->first));
    }
    if (order == 0 && a->first->scheme != b->first->scheme) {
        order = a->first->scheme < b->first->scheme ? -1 : 1;
    }
    int64_t a_shape[ST_RANK_LIMIT];
    int64_t b_shape[ST_RANK_LIMIT];
    const int a_rank = weight_shape(a->first, a_shape);
    const int b_rank = weight_shape(b->first, b_shape);
    if (order == 0) {
        order = a_rank - b_rank;
    }
    for (int i = 0; i < a_rank && order == 0; ++i) {
        order = (a_shape[i] > b_shape[i]) - (a_shape[i] < b_shape[i]);
    }
    return order;
}

/* One group for each weight, sorted, then equal neighbours merged. */
static void make_groups(const struct weights *weights, struct inventory *inventory) {
    struct like_group *const groups = alloc_array(weights->count, sizeof *groups);
    for (size_t i = 0; i < weights->count; ++i) {
        groups[i] = (struct like_group){like_pattern(weights->items[i].name), &weights->items[i], 1};
    }
    qsort(groups, weights->count, sizeof *groups, compare_groups);
    size_t count = 0;
    for (size_t i = 0; i < weights->count; ++i) {
        if (count != 0 && compare_groups(&groups[count - 1], &groups[i]) == 0) {
            struct like_group *const same = &groups[count - 1];
            ++same->count;
            same->first = groups[i].first < same->first ? groups[i].first : same->first;
            free(groups[i].pattern);
        } else {
            groups[count++] = groups[i];
        }
    }
    inventory->groups = groups;
    inventory->group_count = count;
}

void inventory_make(const struct weights *weights, struct inventory *inventory) {
    *inventory = (struct inventory){0};
    size_t capacity = 0;
    for (size_t i = 0; i < weights->count; ++i) {
        const struct weight *const weight = &weights->items[i];
        tally_add(tally_of(inventory, weight_kind(weight), &capacity), weight);
        tally_add(&inventory->all, weight);
        if (weight->scheme != NULL) {
            tally_add(&inventory->quantized, weight);
        }
    }
    if (inventory->kind_count != 0) {
        qsort(inventory->kinds, inventory->kind_count, sizeof *inventory->kinds, compare_tallies);
    }
    make_groups(weights, inventory);
}

void inventory_free(struct inventory *inventory) {
    for (size_t i = 0; i < inventory->group_count; ++i) {
        free(inventory->groups[i].pattern);
    }
    free(inventory->groups);
    free(inventory->kinds);
    *inventory = (struct inventory){0};
}
