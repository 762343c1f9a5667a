/* op/handle/runner_registry.c: handles and holds of runners. */
#include "op/handle/runner_registry.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/fork_lock.h"
#include "base/try.h"

enum { PAGE_SLOTS = 256, PAGE_COUNT = OPAQ_RUNNER_LIMIT / PAGE_SLOTS, SLOT_BITS = 16, NO_SLOT = -1 };

#define ONE_HOLD ((uint64_t)1)
#define HOLDS (((uint64_t)1 << 32) - 1)
#define VALID ((uint64_t)1 << 32)
#define GENERATION_SHIFT 33
#define LAST_GENERATION (((uint64_t)1 << 31) - 1)

struct slot {
    _Atomic uint64_t word;
    struct runner runner; /* written before the word becomes valid, read only while held */
    int next_free;        /* guarded by fork_lock */
};

/* A page is published once, with a release store, and never freed. */
static _Atomic(struct slot *) pages[PAGE_COUNT];
static atomic_int live;

/* Guarded by fork_lock, which is taken to create a runner and to free a slot, never for a lookup. */
static int first_free = NO_SLOT;
static int slots_used; /* slots from here on were never used */

/* ---- handles ---- */

static uint64_t generation_of(uint64_t word) { return word >> GENERATION_SHIFT; }

static int64_t handle_of(int slot, uint64_t generation) {
    return (int64_t)(generation << SLOT_BITS | (uint64_t)slot);
}

/* The slot of a handle; NULL if it never existed. */
static struct slot *slot_of(int64_t handle) {
    const uint64_t bits = (uint64_t)handle;
    const uint64_t generation = bits >> SLOT_BITS;
    const int index = (int)(bits & (OPAQ_RUNNER_LIMIT - 1));
    if (handle < 0 || generation == 0 || generation > LAST_GENERATION) {
        return NULL;
    }
    struct slot *page = atomic_load_explicit(&pages[index / PAGE_SLOTS], memory_order_acquire);
    return page == NULL ? NULL : &page[index % PAGE_SLOTS];
}

static bool is_there(uint64_t word, int64_t handle) {
    return (word & VALID) != 0 && generation_of(word) == (uint64_t)handle >> SLOT_BITS;
}

/* Why a handle is invalid: never issued, if its slot has not reached that generation, or destroyed. */
static void refuse(int64_t handle, const struct slot *slot, uint64_t word, struct opaq_error *error) {
    const bool was_there = slot != NULL && generation_of(word) >= (uint64_t)handle >> SLOT_BITS;
    (void)opaq_fail(error, OPAQ_ERROR_ARGUMENT, "runner %lld %s", (long long)handle,
                    was_there ? "is gone: it was destroyed" : "does not exist");
}

const char *runner_kind_name(int kind) {
    static const char *const names[OPAQ_RUNNER_KIND_COUNT] = {"linear", "mlp", "moe"};
    return kind >= 0 && kind < OPAQ_RUNNER_KIND_COUNT ? names[kind] : "unknown";
}

/* ---- holding ---- */

const struct runner *runner_hold(int64_t handle, int kind, struct opaq_error *error) {
    struct slot *slot = slot_of(handle);
    uint64_t word = slot == NULL ? 0 : atomic_load_explicit(&slot->word, memory_order_relaxed);
    while (slot != NULL && is_there(word, handle)) {
        if (!atomic_compare_exchange_weak_explicit(&slot->word, &word, word + ONE_HOLD, memory_order_acquire,
                                                   memory_order_relaxed)) {
            continue; /* another thread changed the word; `word` has its new value */
        }
        const int is_kind = slot->runner.info.kind;
        if (kind == RUNNER_ANY || kind == is_kind) {
            return &slot->runner;
        }
        runner_release(handle);
        (void)opaq_fail(error, OPAQ_ERROR_ARGUMENT, "runner %lld is a %s runner, expected a %s runner",
                        (long long)handle, runner_kind_name(is_kind), runner_kind_name(kind));
        return NULL;
    }
    refuse(handle, slot, word, error);
    return NULL;
}

/* Makes the slot available again, unless its 2^31 - 1 generations are used up. */
static void give_slot_back(struct slot *slot, int index, uint64_t generation) {
    fork_lock();
    if (generation < LAST_GENERATION) {
        slot->next_free = first_free;
        first_free = index;
    }
    fork_unlock();
}

void runner_release(int64_t handle) {
    struct slot *slot = slot_of(handle);
    /* release: this holder's accesses happen before the destroy; acquire: so do those of all other holders */
    const uint64_t before = atomic_fetch_sub_explicit(&slot->word, ONE_HOLD, memory_order_acq_rel);
    if ((before & HOLDS) != ONE_HOLD) {
        return;
    }
    /* The registry's own hold is released too, so no lookup finds the runner. The lock is not held: a runner's
     * destroy may call functions of this file. */
    if (slot->runner.functions.destroy != NULL) {
        slot->runner.functions.destroy(slot->runner.state);
    }
    give_slot_back(slot, (int)(handle & (OPAQ_RUNNER_LIMIT - 1)), generation_of(before));
}

/* ---- registering ---- */

/* A free slot, with fork_lock held; NULL with a status if there is none. */
static struct slot *take_slot(int *index, enum opaq_status *status, struct opaq_error *error) {
    if (first_free != NO_SLOT) {
        *index = first_free;
        struct slot *page = atomic_load_explicit(&pages[*index / PAGE_SLOTS], memory_order_relaxed);
        first_free = page[*index % PAGE_SLOTS].next_free;
        return &page[*index % PAGE_SLOTS];
    }
    if (slots_used == OPAQ_RUNNER_LIMIT) {
        *status = opaq_fail(error, OPAQ_ERROR_LIMIT,
                            "runner_register: %d runners exist already, which is the limit", OPAQ_RUNNER_LIMIT);
        return NULL;
    }
    struct slot *page = atomic_load_explicit(&pages[slots_used / PAGE_SLOTS], memory_order_relaxed);
    if (page == NULL) {
        page = calloc(PAGE_SLOTS, sizeof *page);
        if (page == NULL) {
            *status = opaq_fail(error, OPAQ_ERROR_MEMORY, "runner_register: no memory for %d more runners",
                                PAGE_SLOTS);
            return NULL;
        }
        atomic_store_explicit(&pages[slots_used / PAGE_SLOTS], page, memory_order_release);
    }
    *index = slots_used++;
    return &page[*index % PAGE_SLOTS];
}

static enum opaq_status check_info(const struct opaq_runner_info *info, struct opaq_error *error) {
    if (info->kind < 0 || info->kind >= OPAQ_RUNNER_KIND_COUNT) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "runner_register: kind is %d, expected 0 (linear), 1 (mlp) or 2 (moe)", info->kind);
    }
    if (info->in_features < 1 || info->out_features < 1) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE,
                         "runner_register: %lld features in and %lld out, expected at least 1",
                         (long long)info->in_features, (long long)info->out_features);
    }
    if ((info->kind == OPAQ_RUNNER_MOE) != (info->experts > 0) || info->experts < 0) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "runner_register: %lld experts in a %s runner, expected %s",
                         (long long)info->experts, runner_kind_name(info->kind),
                         info->kind == OPAQ_RUNNER_MOE ? "at least 1" : "0");
    }
    if (info->kind != OPAQ_RUNNER_LINEAR && info->in_features != info->out_features) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE,
                         "runner_register: %lld features in and %lld out of a %s runner, expected the same",
                         (long long)info->in_features, (long long)info->out_features,
                         runner_kind_name(info->kind));
    }
    if (memchr(info->format, '\0', sizeof info->format) == NULL ||
        memchr(info->kernel, '\0', sizeof info->kernel) == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "runner_register: format or kernel is not terminated");
    }
    return OPAQ_OK;
}

enum opaq_status runner_register(const struct opaq_runner_info *info,
                                 const struct opaq_runner_functions *functions,
                                 const struct opaq_runner_functions *backward, void *state, int64_t *handle,
                                 struct opaq_error *error) {
    if (info == NULL || functions == NULL || handle == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "runner_register: %s is NULL",
                         info == NULL        ? "info"
                         : functions == NULL ? "functions"
                                             : "handle");
    }
    if (functions->abi != OPAQ_RUNNER_ABI) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "runner_register: the functions have the ABI number %u, this library has %d",
                         functions->abi, OPAQ_RUNNER_ABI);
    }
    if (functions->run == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "runner_register: the function run is NULL");
    }
    TRY(check_info(info, error));
    enum opaq_status status = OPAQ_OK;
    int index = 0;
    fork_lock();
    struct slot *slot = take_slot(&index, &status, error);
    fork_unlock();
    if (slot == NULL) {
        return status;
    }
    /* No other thread accesses the slot until the last line makes it valid. */
    const uint64_t generation = generation_of(atomic_load_explicit(&slot->word, memory_order_relaxed)) + 1;
    slot->runner = (struct runner){*info, *functions, backward, state};
    *handle = handle_of(index, generation);
    atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    atomic_store_explicit(&slot->word, generation << GENERATION_SHIFT | VALID | ONE_HOLD, memory_order_release);
    return OPAQ_OK;
}

enum opaq_status opaq_runner_register(const struct opaq_runner_info *info,
                                      const struct opaq_runner_functions *functions, void *state,
                                      int64_t *handle, struct opaq_error *error) {
    return runner_register(info, functions, NULL, state, handle, error);
}

/* ---- querying and destroying ---- */

enum opaq_status opaq_runner_query(int64_t handle, struct opaq_runner_info *info, struct opaq_error *error) {
    if (info == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "runner_query: info is NULL");
    }
    const struct runner *runner = runner_hold(handle, RUNNER_ANY, error);
    if (runner == NULL) {
        return error_prefix(error, OPAQ_ERROR_ARGUMENT, "runner_query");
    }
    *info = runner->info;
    runner_release(handle);
    return OPAQ_OK;
}

enum opaq_status opaq_runner_destroy(int64_t handle, struct opaq_error *error) {
    struct slot *slot = slot_of(handle);
    uint64_t word = slot == NULL ? 0 : atomic_load_explicit(&slot->word, memory_order_relaxed);
    while (slot != NULL && is_there(word, handle)) {
        if (atomic_compare_exchange_weak_explicit(&slot->word, &word, word & ~VALID, memory_order_relaxed,
                                                  memory_order_relaxed)) {
            atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
            runner_release(handle); /* the registry's own hold */
            return OPAQ_OK;
        }
    }
    refuse(handle, slot, word, error);
    return error_prefix(error, OPAQ_ERROR_ARGUMENT, "runner_destroy");
}

int opaq_runner_count(void) { return atomic_load_explicit(&live, memory_order_relaxed); }
