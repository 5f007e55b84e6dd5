/* What the page does in the browser itself: files, keys, dimming, scrolling, and the address of a view. */

const classlens = {
  // The settings of this view: of a sample in the address, so that a link reproduces it; of your own picture only in
  // this tab (a picture's fingerprint, not the picture), so that a reload keeps it.
  remember(address) {
    if (!address) return;
    const sample = address.startsWith('sample=');
    history.replaceState(null, '', location.pathname + location.search + (sample ? '#' + address : ''));
    try {
      if (sample) sessionStorage.removeItem('classlens');
      else sessionStorage.setItem('classlens', address);
    } catch { /* a browser that stores nothing: a reload opens the first sample */ }
  },

  recall() {
    try { return location.hash.slice(1) || sessionStorage.getItem('classlens') || ''; } catch { return ''; }
  },

  // Until the server has answered, what is on the page belongs to the last picture.
  dim(on) { document.body.classList.toggle('arriving', on); },

  send(file, limit, trigger) {
    if (!file) return;
    classlens.dim(true);
    if (file.size > limit) { trigger('upload', {large: true}); return; }
    const reader = new FileReader();
    reader.onload = () => trigger('upload', {content: reader.result.split(',')[1] || ''});
    reader.onerror = () => trigger('upload', {content: ''});
    reader.readAsDataURL(file);
  },

  // On a phone the map may lie below the screen: a tap on a class brings picture and map into view.
  showMap() {
    if (!matchMedia('(max-width: 760px)').matches) return;
    const calm = matchMedia('(prefers-reduced-motion: reduce)').matches;
    document.querySelector('#views').scrollIntoView({behavior: calm ? 'auto' : 'smooth', block: 'start'});
  },

  // A picture is chosen, dropped anywhere or pasted, and sent as base64 in the event itself. Without preventDefault,
  // the browser would open a picture that is dropped outside the box.
  watchPictures(element, trigger) {
    const limit = Number(element.querySelector('[data-limit]').dataset.limit);
    const send = file => classlens.send(file, limit, trigger);
    element.addEventListener('change', event => { send(event.target.files[0]); event.target.value = ''; });
    element.addEventListener('click', event => {
      const sample = event.target.closest('[data-sample]');
      if (!sample) return;
      classlens.dim(true);
      trigger('select', {index: Number(sample.dataset.sample)});
    });
    document.addEventListener('dragover', event => event.preventDefault());
    document.addEventListener('drop', event => { event.preventDefault(); send(event.dataTransfer.files[0]); });
    document.addEventListener('paste', event => send(event.clipboardData.files[0]));
  },

  watchClasses(element, trigger) {
    element.addEventListener('click', event => {
      const bar = event.target.closest('[data-index]');
      if (!bar) return;
      trigger('select', {index: Number(bar.dataset.index)});
      classlens.showMap();
    });
    // The strip of classes scrolls on a phone: the chosen one stays in sight, also when it was found by its name.
    new MutationObserver(() => {
      const strip = element.querySelector('.bars'), chosen = element.querySelector('.chosen');
      if (!strip || !chosen || strip.scrollWidth <= strip.clientWidth) return;
      const left = chosen.offsetLeft - strip.offsetLeft, right = left + chosen.offsetWidth;
      if (left < strip.scrollLeft) strip.scrollLeft = left;
      if (right > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = right - strip.clientWidth;
    }).observe(element, {childList: true, subtree: true, attributes: true, attributeFilter: ['class']});
  },

  // Boxes of a detector, and pixels for a segmentation network: a click asks about what is there. With the keyboard, the
  // arrow keys move a cross, and Enter or the space bar asks.
  watchPicture(element, trigger) {
    const at = aim => [Number(aim.dataset.x ?? 0.5), Number(aim.dataset.y ?? 0.5)];
    element.addEventListener('click', event => {
      const box = event.target.closest('.box'), aim = event.target.closest('.aim');
      if (box) trigger('select', {index: Number(box.dataset.index)});
      if (!aim) return;
      const frame = aim.getBoundingClientRect(), keyed = event.detail === 0;
      const [x, y] = keyed ? at(aim) : [(event.clientX - frame.left) / frame.width, (event.clientY - frame.top) / frame.height];
      trigger('select', {x, y});
    });
    element.addEventListener('keydown', event => {
      const aim = event.target.closest('.aim');
      const step = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
      if (!aim || !step) return;
      event.preventDefault();
      const [x, y] = at(aim).map((value, i) => Math.min(Math.max(value + 0.04 * step[i], 0), 0.999));
      Object.assign(aim.dataset, {x, y});
      aim.style.setProperty('--x', x);
      aim.style.setProperty('--y', y);
    });
  },

  save(parcel) {
    if (!parcel) return;
    const bytes = Uint8Array.from(atob(parcel.content), letter => letter.charCodeAt(0));
    const link = document.createElement('a');
    link.href = URL.createObjectURL(new Blob([bytes], {type: parcel.kind}));
    link.download = parcel.name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  },
};

// gradio opens a list again when Tab has left it, so it never hears of that key; and Tab passes the list by.
addEventListener('keydown', event => {
  if (event.key !== 'Tab' || !event.target.matches?.('[role=combobox]')) return;
  event.stopImmediatePropagation();
  document.querySelectorAll('[role=listbox]').forEach(list => { list.tabIndex = -1; });
}, true);

// Another link pasted into the same tab.
addEventListener('hashchange', () => location.reload());
