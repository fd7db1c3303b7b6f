// Copies beats between NumPy buffers and the wrapper, at the simulator's full speed, with optional random stalls.
#include <cstdint>
#include <cstring>
#include "svdpi.h"

namespace {
const uint8_t *input = nullptr;
uint8_t *output = nullptr;
long beats_in = 0, beats_out = 0, sent = 0, taken = 0;
int bytes_in = 0, bytes_out = 0;
uint32_t send_chance = 0, take_chance = 0;  // of 2^32; 0 means always
uint64_t state = 1;

uint32_t random32() {  // xorshift64*
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return static_cast<uint32_t>((state * 2685821657736338717ull) >> 32);
}
}  // namespace

extern "C" __attribute__((visibility("default"), used)) void stream_set(
    const void *in, void *out, long n_in, long n_out, int b_in, int b_out, uint32_t send, uint32_t take, uint64_t seed) {
    input = static_cast<const uint8_t *>(in);
    output = static_cast<uint8_t *>(out);
    beats_in = n_in;
    beats_out = n_out;
    bytes_in = b_in;
    bytes_out = b_out;
    send_chance = send;
    take_chance = take;
    state = seed | 1;
    sent = taken = 0;
}

extern "C" __attribute__((visibility("default"), used)) long stream_taken() { return taken; }

// One beat to send, if there is one and the sender moves in this cycle.
extern "C" void stream_get(unsigned char *valid, svBitVecVal *beat) {
    bool moves = send_chance == 0 || random32() < send_chance;
    *valid = sent < beats_in && moves;
    if (*valid) memcpy(beat, input + static_cast<size_t>(bytes_in) * sent++, bytes_in);
}

// One beat taken; returns whether it was the last one expected.
extern "C" unsigned char stream_put(const svBitVecVal *beat) {
    if (taken < beats_out) memcpy(output + static_cast<size_t>(bytes_out) * taken, beat, bytes_out);
    return ++taken >= beats_out;
}

// Whether the receiver is ready in the next cycle.
extern "C" unsigned char stream_ready() { return take_chance == 0 || random32() < take_chance; }
