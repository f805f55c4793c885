#include "sass.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <stdexcept>
#include <vector>

namespace headrace::cuda {
namespace {

namespace fs = std::filesystem;

// One line of the listing: "/*05b0*/ @P1 BRA `(.L_x_4) ;".
struct Instruction {
  std::string_view operation;             // "BRA"
  bool conditional = false;               // the next instruction may follow although this one is a branch
  std::vector<std::string_view> targets;  // labels that it names
  std::string_view barrier;               // "B0" of BSSY and BSYNC
  bool tensor = false, local = false;
};

struct Listing {
  std::vector<Instruction> code;
  std::map<std::string_view, std::size_t> labels;  // the instruction behind each
};

std::string_view next_word(std::string_view& text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t,"), text.size()));
  const std::string_view word = text.substr(0, text.find_first_of(" \t,;"));
  text.remove_prefix(word.size());
  return word;
}

Instruction parse(std::string_view line) {
  Instruction instruction;
  for (std::size_t at = line.find(".L_"); at != std::string_view::npos; at = line.find(".L_", at + 1))
    instruction.targets.push_back(line.substr(at, line.find_first_not_of("_.Lx0123456789", at) - at));
  line.remove_prefix(std::min(line.find("*/") + 2, line.size()));
  std::string_view word = next_word(line);
  if (word.starts_with('@')) {
    instruction.conditional = true;
    word = next_word(line);
  }
  instruction.operation = word.substr(0, word.find('.'));
  const std::string_view operand = next_word(line);
  if (instruction.operation == "BSSY" || instruction.operation == "BSYNC") instruction.barrier = operand;
  // "BRA.DIV UR4, `(...)" and "BRA.U !UP0, `(...)" depend on what stands before the label.
  if (instruction.operation == "BRA" && !operand.starts_with('`')) instruction.conditional = true;
  instruction.tensor = word.starts_with("HGMMA") || word.starts_with("IGMMA") || word.starts_with("QGMMA");
  instruction.local = instruction.operation == "LDL" || instruction.operation == "STL";
  return instruction;
}

Listing read_listing(std::string_view sass) {
  Listing listing;
  while (!sass.empty()) {
    const std::size_t end = sass.find('\n');
    std::string_view line = sass.substr(0, end);
    sass.remove_prefix(end == std::string_view::npos ? sass.size() : end + 1);
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
    if (line.starts_with(".L_")) listing.labels[line.substr(0, line.find(':'))] = listing.code.size();
    if (line.starts_with("/*")) listing.code.push_back(parse(line));
  }
  return listing;
}

bool may_leave(const Instruction& instruction) {
  static const std::set<std::string_view> leaving = {"BRA", "BRX", "BSYNC", "EXIT", "RET", "WARPSYNC"};
  return leaving.contains(instruction.operation);
}

// Which instructions may follow each. BSYNC continues at the label that the BSSY of its barrier has set before, which
// may stand far from it: what the barriers hold is followed along every way, from block to block.
class Flow {
 public:
  explicit Flow(const Listing& listing)
      : listing_(listing), successors_(listing.code.size()), begins_block_(listing.code.size() + 1, false) {
    for (const auto& [label, at] : listing.labels) begins_block_[at] = true;
    for (std::size_t i = 0; i < listing.code.size(); ++i)
      if (may_leave(listing.code[i])) begins_block_[i + 1] = true;
    if (!listing.code.empty()) reach(0, {});
    while (!open_.empty()) follow(open_.extract(open_.begin()).value());
  }
  const std::vector<std::vector<std::size_t>>& successors() const { return successors_; }

 private:
  using Barriers = std::map<std::string_view, std::set<std::size_t>>;  // where each of them continues

  // The block at `at` may begin with these: it is followed if that is new.
  void reach(std::size_t at, const Barriers& barriers) {
    const auto [known, is_new] = held_.try_emplace(at);
    bool changed = is_new;
    for (const auto& [barrier, labels] : barriers)
      for (const std::size_t label : labels) changed = known->second[barrier].insert(label).second || changed;
    if (changed) open_.insert(at);
  }

  void follow(std::size_t at) {
    Barriers barriers = held_[at];
    for (;; ++at) {
      const std::set<std::size_t> next = next_of(at, barriers);
      successors_[at].assign(next.begin(), next.end());
      const bool goes_on = next.size() == 1 && *next.begin() == at + 1 && !begins_block_[at + 1];
      if (goes_on) continue;
      for (const std::size_t to : next) reach(to, barriers);
      return;
    }
  }

  std::set<std::size_t> next_of(std::size_t at, Barriers& barriers) const {
    const Instruction& instruction = listing_.code[at];
    std::set<std::size_t> targets, next;
    for (const std::string_view name : instruction.targets)
      if (const auto label = listing_.labels.find(name); label != listing_.labels.end()) targets.insert(label->second);
    if (instruction.operation == "BSSY")
      barriers[instruction.barrier] = targets;
    else if (instruction.operation == "BSYNC")
      next = barriers[instruction.barrier];
    else if (may_leave(instruction))
      next = targets;
    const bool stays = !may_leave(instruction) || instruction.conditional || instruction.operation == "WARPSYNC" ||
                       (instruction.operation == "BSYNC" && next.empty());
    if (stays) next.insert(at + 1);
    std::erase_if(next, [&](std::size_t to) { return to >= listing_.code.size(); });
    return next;
  }

  const Listing& listing_;
  std::vector<std::vector<std::size_t>> successors_;
  std::vector<bool> begins_block_;
  std::map<std::size_t, Barriers> held_;  // at the beginning of each block
  std::set<std::size_t> open_;            // blocks to be followed, from the first on
};

// Instructions in an order in which each comes before those that follow it, but for the way back in loops.
std::vector<std::size_t> topological_order(const std::vector<std::vector<std::size_t>>& successors) {
  std::vector<std::size_t> order;
  std::vector<std::size_t> next(successors.size(), 0), path;
  std::vector<bool> seen(successors.size(), false);
  if (!successors.empty()) path.push_back(0), seen[0] = true;
  while (!path.empty()) {
    const std::size_t at = path.back();
    if (next[at] == successors[at].size()) {
      order.push_back(at);
      path.pop_back();
    } else if (const std::size_t to = successors[at][next[at]++]; !seen[to]) {
      seen[to] = true;
      path.push_back(to);
    }
  }
  std::reverse(order.begin(), order.end());
  return order;
}

using Loop = std::set<std::size_t>;  // the instructions of a natural loop

// Cooper, Harvey, Kennedy: "A simple, fast dominance algorithm" (2001). A branch to an instruction that dominates it
// closes a loop; a branch from code that the compiler has moved out of the way back into it does not.
std::vector<Loop> loops_of(const Listing& listing) {
  const Flow flow(listing);
  const auto& successors = flow.successors();
  const std::vector<std::size_t> order = topological_order(successors);
  const std::size_t count = listing.code.size(), none = count;
  std::vector<std::size_t> rank(count, none), dominator(count, none);
  for (std::size_t i = 0; i < order.size(); ++i) rank[order[i]] = i;
  std::vector<std::vector<std::size_t>> predecessors(count);
  for (const std::size_t from : order)
    for (const std::size_t to : successors[from]) predecessors[to].push_back(from);

  const auto common = [&](std::size_t a, std::size_t b) {
    while (a != b) {
      while (rank[a] > rank[b]) a = dominator[a];
      while (rank[b] > rank[a]) b = dominator[b];
    }
    return a;
  };
  if (count > 0) dominator[0] = 0;
  for (bool changed = true; changed;) {
    changed = false;
    for (const std::size_t at : order) {
      if (at == 0) continue;
      std::size_t found = none;
      for (const std::size_t from : predecessors[at])
        if (dominator[from] != none) found = found == none ? from : common(found, from);
      changed = changed || dominator[at] != found;
      dominator[at] = found;
    }
  }

  std::map<std::size_t, Loop> loops;  // by their first instruction
  for (const std::size_t from : order)
    for (const std::size_t head : successors[from]) {
      if (rank[head] > rank[from] || common(head, from) != head) continue;
      Loop& loop = loops[head];
      loop.insert(head);
      std::vector<std::size_t> open = {from};
      while (!open.empty()) {
        const std::size_t at = open.back();
        open.pop_back();
        if (loop.insert(at).second) open.insert(open.end(), predecessors[at].begin(), predecessors[at].end());
      }
    }
  std::vector<Loop> all;
  for (auto& [head, loop] : loops) all.push_back(std::move(loop));
  return all;
}

}  // namespace

SassReport count_instructions(std::string_view sass) {
  const Listing listing = read_listing(sass);
  SassReport report;
  report.instructions = static_cast<int>(listing.code.size());
  for (const Instruction& instruction : listing.code) {
    report.tensor_instructions += instruction.tensor ? 1 : 0;
    report.local_accesses += instruction.local ? 1 : 0;
  }
  std::vector<Loop> loops = loops_of(listing);
  std::erase_if(loops, [&](const Loop& loop) {
    return std::none_of(loop.begin(), loop.end(), [&](std::size_t i) { return listing.code[i].tensor; });
  });
  std::set<std::size_t> inner;
  for (const Loop& loop : loops) {
    const bool innermost = std::none_of(loops.begin(), loops.end(), [&](const Loop& other) {
      return other.size() < loop.size() && std::includes(loop.begin(), loop.end(), other.begin(), other.end());
    });
    if (!innermost) continue;
    ++report.tensor_loops;
    inner.insert(loop.begin(), loop.end());
  }
  report.loop_local_accesses =
      static_cast<int>(std::count_if(inner.begin(), inner.end(), [&](std::size_t i) { return listing.code[i].local; }));
  return report;
}

std::string nvdisasm_path() {
  const char* chosen = std::getenv("HEADRACE_NVDISASM");
  const std::string path = chosen == nullptr ? HEADRACE_TEST_NVDISASM : chosen;
  return access(path.c_str(), X_OK) == 0 ? path : "";
}

std::string disassemble(const std::string& cubin) {
  std::string file = (fs::temp_directory_path() / "headrace_sass_XXXXXX").string();
  const int descriptor = mkstemp(file.data());
  if (descriptor < 0) throw std::runtime_error("cannot write " + file);
  close(descriptor);
  std::ofstream(file, std::ios::binary) << cubin;
  const std::string command = fmt::format("'{}' -c '{}' 2>&1", nvdisasm_path(), file);
  FILE* output = popen(command.c_str(), "r");
  std::string text;
  std::array<char, 65536> part{};
  for (std::size_t bytes = 0; output != nullptr && (bytes = fread(part.data(), 1, part.size(), output)) > 0;)
    text.append(part.data(), bytes);
  const int status = output == nullptr ? -1 : pclose(output);
  fs::remove(file);
  if (status != 0) throw std::runtime_error(command + " failed: " + text.substr(0, 1000));
  return text;
}

}  // namespace headrace::cuda
