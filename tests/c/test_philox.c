/* test_philox.c: Philox 4x32-10 against the known-answer vectors of Random123, the authors' own library. */
#include "base/philox.h"

#include "check.h"

struct vector {
    struct philox_block counter;
    uint32_t key[2];
    struct philox_block expected;
};

static const struct vector vectors[] = {
    {{{0, 0, 0, 0}}, {0, 0}, {{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}}},
    {{{0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF}},
     {0xFFFFFFFF, 0xFFFFFFFF},
     {{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}}},
    {{{0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}},
     {0xA4093822, 0x299F31D0},
     {{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}}},
};

static void known_answers(void) {
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; ++i) {
        const struct vector *v = &vectors[i];
        const struct philox_block actual = philox(v->counter, v->key[0], v->key[1]);
        for (int word = 0; word < 4; ++word) {
            CHECK_EQ_INT(actual.word[word], v->expected.word[word]);
        }
    }
}

/* Every bit of counter and key affects every word. */
static void each_input_bit_changes_each_word(void) {
    const struct philox_block base = philox(vectors[2].counter, 1, 2);
    for (int bit = 0; bit < 192; ++bit) {
        struct philox_block counter = vectors[2].counter;
        uint32_t key[2] = {1, 2};
        if (bit < 128) {
            counter.word[bit / 32] ^= 1u << bit % 32;
        } else {
            key[bit / 32 - 4] ^= 1u << bit % 32;
        }
        const struct philox_block other = philox(counter, key[0], key[1]);
        for (int word = 0; word < 4; ++word) {
            CHECK(other.word[word] != base.word[word]);
        }
    }
}

static const struct test_case tests[] = {TEST(known_answers), TEST(each_input_bit_changes_each_word)};
TEST_MAIN(tests)
