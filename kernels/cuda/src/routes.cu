// Packing of expert ids into as few bits as they need.

typedef unsigned char u8;

// Each thread writes 32 bits of output. ids [T, num_ids], packed [T, num_bytes].
extern "C" __global__ void __launch_bounds__(256) routes_pack(const short *ids, u8 *packed,
                                                              long long num_tokens, int num_ids,
                                                              int num_bytes, int width) {
    int num_words = (num_bytes + 3) / 4;
    long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    long long token = index / num_words;
    if (token >= num_tokens) return;
    int word = static_cast<int>(index % num_words), first_bit = word * 32;
    unsigned bits = 0;
    for (int i = first_bit / width; i < num_ids && i * width < first_bit + 32; i++) {
        unsigned id = static_cast<unsigned>(ids[token * num_ids + i]);
        int shift = i * width - first_bit;
        bits |= shift < 0 ? id >> -shift : id << shift;
    }
    u8 *to = packed + token * num_bytes + word * 4;
    if (num_bytes % 4 == 0) {
        *reinterpret_cast<unsigned *>(to) = bits;
    } else {
        for (int i = 0; i < 4 && word * 4 + i < num_bytes; i++)
            to[i] = static_cast<u8>(bits >> (8 * i));
    }
}
